"""`python -m tests.lab.faults`: breaks trainings in every known way and scores what is said."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

from rankscope.server.demo.processes import handling_sigterm
from tests.lab.faults import table
from tests.lab.faults.case import MODELS
from tests.lab.faults.families import REGISTRY
from tests.lab.faults.lab import Lab, Result, jobs_of


def main() -> int:
    """Runs the lab; exit code 1 where a case could not be judged."""
    options = _options()
    if options.list:
        for case in REGISTRY.cases.values():
            print(f"{case.id:5} {case.family:14} {case.what}")
        return 0
    cases = REGISTRY.chosen(options.case, options.family)
    jobs = jobs_of(
        cases,
        worlds=options.ranks or (2, 4),
        models=options.model or MODELS,
        seeds=options.seeds,
        first_seed=options.first_seed,
        all_models=options.all_models,
    )
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(handling_sigterm())
        # Also what there is when it is interrupted.
        stack.callback(_write, options, results)
        folder = options.folder
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faultlab-"))
        lab = stack.enter_context(Lab(Path(folder).resolve(), full=options.full_sampling))
        for result in lab.results(jobs):
            results.append(result)
            if not options.quiet:
                print(" | ".join(cell for cell in table.row(result) if cell), flush=True)
    return 1 if any(result.score.error for result in results) else 0


def _write(options: argparse.Namespace, results: list[Result]) -> None:
    if options.json:
        reported = {"full_sampling": options.full_sampling, **table.as_json(results)}
        Path(options.json).write_text(json.dumps(reported, indent=1) + "\n")
    if options.markdown:
        Path(options.markdown).write_text(table.as_markdown(results))
    print(json.dumps(table.summary(results)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.faults", description=__doc__)
    add = parser.add_argument
    families = sorted({case.family for case in REGISTRY.cases.values()})
    add("--list", action="store_true", help="say which cases there are")
    add("--case", nargs="+", default=[], choices=REGISTRY.cases, metavar="ID")
    add("--family", nargs="+", default=[], choices=families, help="a section of the catalogue")
    add("--ranks", nargs="+", type=int, choices=(2, 4), help="default: 2 and 4")
    add("--model", nargs="+", choices=MODELS, help="default: they take turns")
    add("--all-models", action="store_true", help="each case with each model")
    add("--seeds", type=int, default=1, help="runs of each case")
    add("--first-seed", type=int, default=0, help="to go on where an earlier run ended")
    add("--full-sampling", action="store_true", help="sample everything at every step")
    add("--json", metavar="FILE")
    add("--markdown", metavar="FILE")
    add("--folder", help="keep database and logs there")
    add("--quiet", action="store_true", help="no line for each case")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
