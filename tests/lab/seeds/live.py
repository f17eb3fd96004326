"""`python -m tests.lab.seeds.live FOLDER`: how often `baseline.loss` speaks, and at which step.

Of the trainings that `python -m tests.lab.seeds FOLDER` has left there. Columns: other seeds; the
same with a loss that is 3, 10 and 30 % higher at all steps; and with half of the updates. Each run
is held against some others, drawn by chance; half of the steps at which it speaks are later than
the one that is printed.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rankscope.server.comparison.measures import Recorded
from rankscope.server.detectors.baseline.loss import BaselineLoss
from rankscope.server.detectors.baseline.measured import EVALUATION, LOSS
from tests.support.judging import judge
from tests.support.runs.beside import baselines_of
from tests.support.runs.traces import Trace

_HIGHER = (1.03, 1.1, 1.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--baselines", type=int, default=10)
    options = parser.parse_args()
    for kept in sorted(options.folder.glob("*.pickle")):
        good, slow = pickle.loads(kept.read_bytes())
        runs = [_values(run) for run in good]
        columns = {"seeds": runs}
        for factor in _HIGHER:
            columns[f"x {factor:g}"] = [_times(run, factor) for run in runs]
        columns["half the updates"] = [_values(run) for run in slow]
        cells = [
            f"{name}: {_found(tried, runs, options.baselines)}" for name, tried in columns.items()
        ]
        print(f"{kept.stem:20} {options.baselines:2} | {' | '.join(cells)}", flush=True)


def _found(
    tried: Sequence[Mapping[str, np.ndarray]],
    runs: Sequence[Mapping[str, np.ndarray]],
    baselines: int,
) -> str:
    """How many of the runs are found beside some of the others, and when."""
    random = np.random.default_rng(1)
    steps = []
    for number, run in enumerate(tried):
        others = [n for n in random.permutation(len(runs)) if n != number][:baselines]
        beside = {name: [runs[n][name] for n in others] for name in run}
        series = {name: values[None] for name, values in run.items()}
        present = {name: np.isfinite(values) for name, values in series.items()}
        each = np.arange(len(run[LOSS]))
        trace = Trace("live", 0, each, series, present, baselines=baselines_of(beside))
        alerts = judge(trace, [BaselineLoss()]).alerts
        steps += [alerts[0].seen_step] if alerts else []
    when = f" from step {np.median(steps):.0f}" if steps else ""
    return f"{len(steps)} of {len(tried)}{when}"


def _values(run: Recorded) -> dict[str, np.ndarray]:
    """By step, NaN where nothing was recorded."""
    count = int(run.courses[LOSS].steps[-1]) + 1
    found = {}
    for name in (LOSS, EVALUATION):
        found[name] = np.full(count, np.nan)
        found[name][run.courses[name].steps] = run.courses[name].values
    return found


def _times(run: Mapping[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    return {name: factor * values for name, values in run.items()}


if __name__ == "__main__":
    main()
