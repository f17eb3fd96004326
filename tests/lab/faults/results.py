"""`python -m tests.lab.faults.results FILE.json ... > RESULTS.md`: runs of the lab side by side.

Takes what `--json` has written, of any number of runs; of faults that several of them hold the last
one counts, of benign cases all of them do.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_COLUMNS = ((4, False), (2, False), (4, True), (2, True))


def main() -> int:
    """Prints the tables; exit code 1 where a fault was missed or a benign case raised an alarm."""
    faults, benign = together(json.loads(Path(name).read_text()) for name in sys.argv[1:])
    print(as_markdown(faults, benign))
    missed = any(not found["score"]["right"] for found in faults.values())
    alarmed = any(run["score"]["false_alarms"] for runs in benign.values() for run in runs)
    return 1 if missed or alarmed else 0


def together(
    files: Iterable[Json],
) -> tuple[dict[tuple[str, int, bool], Json], dict[tuple[str, int], list[Json]]]:
    """Faults by case, ranks and whether everything was sampled; benign runs by case and ranks.

    What could not be judged is left out.
    """
    faults: dict[tuple[str, int, bool], Json] = {}
    benign: dict[tuple[str, int], list[Json]] = defaultdict(list)
    for file in files:
        for result in file["results"]:
            if result["score"]["error"]:
                continue
            if result["expected"]["kinds"]:
                faults[result["case"], result["world"], file["full_sampling"]] = result
            else:
                benign[result["case"], result["world"]].append(result)
    return faults, benign


def as_markdown(
    faults: dict[tuple[str, int, bool], Json], benign: dict[tuple[str, int], list[Json]]
) -> str:
    """Both tables, with their totals."""
    lines = ["| fault | what | 4 ranks | 2 ranks | 4 ranks, all steps | 2 ranks, all steps |"]
    lines += ["|---|---|---|---|---|---|"]
    for case, what in sorted({(c, r["what"]) for (c, _, _), r in faults.items()}):
        cells = [_cell(faults.get((case, *column))) for column in _COLUMNS]
        lines.append(f"| {case} | {what} | {' | '.join(cells)} |")
    totals = [
        _total([r for (_, *rest), r in faults.items() if tuple(rest) == column])
        for column in _COLUMNS
    ]
    lines += [f"| | **detected, right, right and on time** | {' | '.join(totals)} |", ""]
    lines += ["| benign | what | 4 ranks: runs | alarms | 2 ranks: runs | alarms |"]
    lines += ["|---|---|---|---|---|---|"]
    for case, what in sorted({(c, runs[0]["what"]) for (c, _), runs in benign.items()}):
        counts = [str(n) for ranks in (4, 2) for n in _alarms(benign.get((case, ranks), []))]
        lines.append(f"| {case} | {what} | {' | '.join(counts)} |")
    sums = [
        str(sum(_alarms(runs)[n] for (_, of), runs in benign.items() if of == ranks))
        for ranks in (4, 2)
        for n in (0, 1)
    ]
    lines += [f"| | **all** | {' | '.join(sums)} |"]
    return "\n".join(lines)


def _cell(result: Json | None) -> str:
    if result is None:
        return ""
    score, alert = result["score"], result["alert"]
    if not score["detected"] or alert is None:
        return "missed"
    wrong = [n for n in ("kind", "stage", "ranks", "tensors") if not score[n]]
    late = f" +{score['delay']}" if score["delay"] else ""
    return f"{alert['kind']}{late}" + (f" (wrong {', '.join(wrong)})" if wrong else "")


def _total(results: Sequence[Json]) -> str:
    scores = [result["score"] for result in results]
    found = [sum(score[name] for score in scores) for name in ("detected", "right")]
    found.append(sum(score["right"] and score["onset"] for score in scores))
    return f"{', '.join(map(str, found))} of {len(scores)}" if scores else ""


def _alarms(runs: Sequence[Json]) -> tuple[int, int]:
    """Number of runs, and of those with a false alarm."""
    return len(runs), sum(run["score"]["false_alarms"] > 0 for run in runs)


if __name__ == "__main__":
    sys.exit(main())
