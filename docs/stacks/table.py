"""Writes README.md of this folder from what `make test-stacks` found: stack x signal.

python -m docs.stacks.table
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
SIGNALS = {
    "loss": ("loss",),
    "local gradient": ("grad_norm_local", "local_gradient"),
    "reduced gradient": ("grad_norm", "reduced_gradient"),
    "parameters": ("start", "parameters"),
    "optimizer state": ("optimizer_state",),
    "timing": ("step_seconds",),
    "data": ("batch", "samples", "data_seconds"),
}
_HEAD = """# Training stacks

<!-- Written by docs/stacks/table.py from results.json, which `make test-stacks` writes. -->

Each line is a real job on a CPU, started by the stack's own launcher: once healthy, and once for
each fault. *Faults* is how many of them got the right kind, rank and step and no further
alarm; those that were not are named below. A signal without a mark did not arrive from that
stack: state that is held once, as a shard or by its owner, is compared with nothing.

To add a stack: a job in `tests/stacks/jobs`, a page here, and an adapter in `agent/integrations`
where `attach` and `start` are not enough. (Packages that it needs are named in
`tests/stacks/install.sh`, with their versions in `constraints.txt`.)
"""


def page() -> str:
    """The page as it has to be."""
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    heads = ("stack", "launcher", "ranks", "healthy", "faults", *SIGNALS)
    rows = [_row(name, found) for name, found in results.items()]
    lines = [_HEAD, _line(heads), _line("---" for _ in heads), *map(_line, rows), ""]
    lines += ["How to: " + ", ".join(f"[{p.stem}]({p.name})" for p in _pages()) + ".", ""]
    gaps = [
        f"- `{name}`, {case}: {why}"
        for name, found in results.items()
        for case, why in found["gaps"].items()
    ]
    if gaps:
        lines += ["## What is not told rightly yet", "", *gaps, ""]
    return "\n".join(lines)


def _row(name, found):
    cases = found["cases"]
    faults = [case["right"] for key, case in cases.items() if key != "healthy"]
    return (
        f"[`{name}`](../../tests/stacks/jobs/{name}.py)",
        found["launch"],
        str(found["ranks"]),
        "no alarm" if cases["healthy"]["right"] else "false alarm",
        f"{sum(faults)} of {len(faults)}",
        *("measured" if set(names) & set(found["seen"]) else "-" for names in SIGNALS.values()),
    )


def _pages():
    return sorted(path for path in HERE.glob("*.md") if path.name != "README.md")


def _line(cells):
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(), encoding="utf-8")
