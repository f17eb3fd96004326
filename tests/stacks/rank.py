"""One rank of a stack's job: trains its cases one after the other, in one process.

    LAUNCHER rank.py STACK FACTS

The launcher is the stack's own. Each case is a run of its own on the server; what is expected of
each is written beside it before anything is trained.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from tests.lab.faults.case import Expected, Setting


def main() -> None:
    """Trains all cases of a stack."""
    stack, facts = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    job = importlib.import_module(f"tests.stacks.jobs.{stack}")
    rank = job.begin()
    cases = [
        case(
            Setting(
                world=job.WORLD,
                rank=rank,
                model=getattr(job, "MODEL", "mlp"),
                seed=facts["seed"],
                run=f"{facts['prefix']}-{case.id}",
                server=facts["server"],
                full=True,
                folder=facts["folder"],
            )
        )
        for case in job.CASES
        if facts["only"] in ("", case.id)
    ]
    if rank == 0:
        described = [
            {"case": c.id, "what": c.what, "run": c.setting.run, "expected": _plain(c.expected())}
            for c in cases
        ]
        Path(facts["folder"], "cases.json").write_text(json.dumps(described), encoding="utf-8")
    for case in cases:
        case.train()


def _plain(expected: Expected) -> dict[str, Any]:
    plain = dataclasses.asdict(expected)
    plain["ranks"] = [sorted(ranks) for ranks in expected.ranks]
    plain["tensors"] = None if expected.tensors is None else sorted(expected.tensors)
    return plain


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    if multiprocessing.parent_process() is None:
        # A gloo thread may still want the interpreter's lock while the interpreter shuts down.
        os._exit(0)
