"""`python -m tests.lab.seeds FOLDER`: trains what is not there yet, and prints what is found.

Columns: how often a good run fails against N runs, and how often one that is 3 % worse, takes twice
the steps, or has steps twice as long, is found.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rankscope.server.comparison.courses import Course
from rankscope.server.comparison.measures import Recorded
from rankscope.server.comparison.regression import compared
from tests.lab.seeds.trainings import recorded, sorts

GOOD, SLOW = 30, 10
TRIALS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--only", nargs="*", default=list(sorts()))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in options.only:
        sort = sorts()[name]
        kept = options.folder / f"{name.replace(' ', '-')}.pickle"
        if not kept.exists():
            good = [recorded(sort, seed) for seed in range(GOOD)]
            slow = [recorded(sort, 1000 + seed, every=2) for seed in range(SLOW)]
            kept.write_bytes(pickle.dumps((good, slow)))
        good, slow = pickle.loads(kept.read_bytes())
        report(name, good, slow, options.tolerance)


def report(name: str, good: Sequence[Recorded], slow: Sequence[Recorded], tolerance: float) -> None:
    """Prints the line of a sort."""
    for runs in (1, 3, 10):
        random = np.random.default_rng(runs)
        cells = []
        for others in (
            None,
            [scaled(r, "loss", 1.03) for r in good],
            slow,
            [scaled(r, "step_seconds", 2.0) for r in good],
        ):
            failed: dict[str, int] = {}
            for _ in range(TRIALS):
                order = random.permutation(len(good))
                one = good[order[0]] if others is None else others[random.integers(len(others))]
                baseline = [good[i] for i in order[1:] if good[i].name != one.name][:runs]
                found = compared(one, baseline, tolerance=tolerance).measures
                names = [m.name for m in found if m.state == "failed"]
                for each in [*names, *(["any"] if names else [])]:
                    failed[each] = failed.get(each, 0) + 1
            cells.append(
                " ".join(f"{n.split('_')[0]}:{c / TRIALS:.0%}" for n, c in failed.items()) or "-"
            )
        print(f"{name:20} {runs:2} | " + " | ".join(cells), flush=True)


def scaled(run: Recorded, metric: str, factor: float) -> Recorded:
    course = run.courses[metric]
    courses = {**run.courses, metric: Course(course.steps, course.values * factor)}
    return replace(run, courses=courses)


if __name__ == "__main__":
    main()
