"""Records the corpus, judges it, and keeps what the tests replay.

python -m benchmarks.corpus record FOLDER --seeds 0 1 2
python -m benchmarks.corpus judge FOLDER
python -m benchmarks.corpus keep FOLDER
python -m benchmarks.corpus table FOLDER   # records what is not there yet, and prints the tables
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from support.traces import Trace

from benchmarks.corpus import table
from benchmarks.corpus.families import FAULTY, HEALTHY, record
from rankscope.server.alerts.causes import link
from rankscope.server.alerts.lifecycle import fold
from rankscope.server.detectors import build
from rankscope.server.detectors.runner import Evaluation

TRACES = Path(__file__).parents[2] / "tests" / "server" / "detectors" / "traces"
KEPT = ("loss", "grad_norm", "lr")
# Like others that are kept.
LEFT_OUT = ("F22", "F43-demo-lr-x10", "F43-demo-lr-x100", "H10", "H34")


def judge(trace: Trace) -> list[str]:
    """One line for each alert of a trace; consequences are indented."""
    evaluation = Evaluation(build(), strict=True)
    alerts: dict[str, object] = {}
    for window in trace.windows(range(0, len(trace.steps), 50)):
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
    """Puts one seed of each family, with the series that matter, where the tests find it."""
    for path in sorted(folder.glob("*.0.npz")):
        if path.name.removesuffix(".0.npz") in LEFT_OUT or path.name[:3] in LEFT_OUT:
            continue
        trace = Trace.load(path)
        series = {name: trace.series[name] for name in KEPT}
        replace(trace, series=series).save(TRACES / f"{path.name.removesuffix('.0.npz')}.npz")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("record", "judge", "keep", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in (HEALTHY | FAULTY) if n.startswith(arguments.family)]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "table":
        sys.exit(table.report(arguments.folder, names, arguments.seeds))
    if arguments.what == "keep":
        keep(arguments.folder)
        return
    for name in names:
        for seed in arguments.seeds:
            path = arguments.folder / f"{name}.{seed}.npz"
            if arguments.what == "record":
                record(name, seed).save(path)
                print(path.name, path.stat().st_size, flush=True)
                continue
            lines = judge(Trace.load(path))
            serious = [line for line in lines if not line.lstrip().startswith("info")]
            print(f"{name} seed {seed}:{'' if serious else ' quiet'}")
            for line in lines:
                print(f"    {line}")


if __name__ == "__main__":
    main()
