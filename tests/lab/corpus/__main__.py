"""Records the corpus, judges it, and renews what the tests replay.

python -m tests.lab.corpus record FOLDER --seeds 0 1 2
python -m tests.lab.corpus judge FOLDER
python -m tests.lab.corpus keep FOLDER
python -m tests.lab.corpus table FOLDER --coverage docs/coverage.md   # records what is missing
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from rankscope.server.alerts.causes import link
from rankscope.server.alerts.lifecycle import fold
from rankscope.server.detectors import build
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.detectors.settings import Effective
from tests.lab.corpus import recorded, table
from tests.lab.corpus.families import FAULTY, HEALTHY
from tests.support.runs.traces import Trace

TRACES = Path(__file__).parents[3] / "tests" / "server" / "detectors" / "traces"


def judge(run: Trace, settings: Effective) -> list[str]:
    """One line for each alert of a run; consequences are indented."""
    evaluation = Evaluation(build(settings), settings=settings, strict=True)
    alerts: dict[str, object] = {}
    for window in run.windows(range(0, len(run.steps), 50)):
        findings, _ = evaluation.advance(window)
        folded = fold(
            tuple(alerts.values()), findings, run="r", through_step=window.last_step, now=window.now
        )
        alerts |= {alert.id: alert for alert in folded.alerts}
    alerts |= {alert.id: alert for alert in link(tuple(alerts.values()))}
    return [
        f"{'    ' if a.parent else ''}{a.severity:8} {a.kind:18} {a.first_step:5}-{a.last_step:<5} "
        f"seen {a.seen_step:<5} ranks {list(a.ranks)} {a.state:8} {a.title}"
        for a in alerts.values()
    ]


def keep(folder: Path) -> None:
    """Renews what the tests replay: the same runs of the same seeds, as much as is kept of each."""
    for path in sorted(TRACES.glob("*.npz")):
        kept = Trace.load(path)
        source = recorded.path_of(folder, path.stem, kept.seed)
        if path.stem in HEALTHY | FAULTY and source.exists():
            recorded.renewed(Trace.load(source), path.stem, kept).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("record", "judge", "keep", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="*",
        help="by default those that the documentation speaks of: 0 to 6 of healthy families, "
        "0 to 2 of broken ones",
    )
    parser.add_argument("--coverage", type=Path, metavar="PAGE", help="with table: write the page")
    parser.add_argument(
        "--variations",
        action="store_true",
        help="with table: judge every run in other units, windows, ranks and sparse, too",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that judge, with table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = [
        (name, seed)
        for name in (HEALTHY | FAULTY)
        if name.startswith(arguments.family)
        for seed in arguments.seeds or (range(7) if name in HEALTHY else range(3))
    ]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "table":
        wrong = table.report(
            arguments.folder,
            runs,
            arguments.coverage,
            workers=arguments.workers,
            vary=arguments.variations,
        )
        sys.exit(wrong)
    if arguments.what == "keep":
        keep(arguments.folder)
        return
    for name, seed in runs:
        if arguments.what == "record":
            made = recorded.record(arguments.folder, name, seed)
            print(f"{name} seed {seed}: {'recorded' if made else 'there'}", flush=True)
            continue
        run = recorded.load(arguments.folder, name, seed)
        lines = judge(run, recorded.settings_of(name))
        serious = [line for line in lines if not line.lstrip().startswith("info")]
        print(f"{name} seed {seed}:{'' if serious else ' quiet'}")
        for line in lines:
            print(f"    {line}")


if __name__ == "__main__":
    main()
