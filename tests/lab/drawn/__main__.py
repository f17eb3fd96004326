"""`python -m tests.lab.drawn`: draws trainings and faults, runs them, scores what is said."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from rankscope.server.demo.processes import handling_sigterm
from tests.lab.drawn import power
from tests.lab.drawn.fault import draw_fault, part_of
from tests.lab.drawn.lab import Lab, results
from tests.lab.drawn.recipe import draw_recipe
from tests.lab.faults.rest import Json


def main() -> int:
    """Runs the lab, or shows what it has kept."""
    options = _options()
    folder = Path(options.folder).resolve()
    if options.do == "run":
        with handling_sigterm(), Lab(folder, full=options.full_sampling) as lab:
            for number in _numbers(options):
                line = lab.healthy(number) if options.healthy else lab.faulty(number)
                if line is not None:
                    print(_line(line), flush=True)
    elif options.do == "show":
        for line in results(folder):
            if options.number is None or line["number"] in options.number:
                if line["part"] == "tuning" or options.look_at_judging:
                    print(json.dumps(line, indent=1) if options.number else _line(line))
    lines = results(folder)
    print(power.table(lines))
    if options.page:
        power.write_page(lines, Path(options.page))
    return 0


def _numbers(options: argparse.Namespace) -> Iterable[int]:
    """Those of the part asked for, in their order."""
    if options.number:
        yield from options.number
        return
    number, found = options.first, 0
    while found < options.count:
        recipe = draw_recipe(number)
        family = recipe.family if options.healthy else draw_fault(number, recipe).family
        if options.part in ("both", part_of(family)):
            found += 1
            yield number
        number += 1


def _line(line: Json) -> str:
    recipe = line["recipe"]
    head = f"{line['number']:5} {recipe['scheme']} x{recipe['world']} {recipe['model']}"
    if line["error"]:
        return f"{head}: NOT JUDGED: {line['error']}"
    if line["part"] == "judging":
        return f"{head}: judged"  # nothing is looked at there but the score
    if not line["faulty"]:
        return f"{head}: healthy {line['false_alarms'] or ''}"
    fault, effect, score = line["fault"], line["effect"], line["score"]
    what = f"{line['family']} {fault['timing']}@{fault['onset']} r{fault['ranks']}"
    what += f" {fault['extent']} x{fault['size']:.2g}"
    if not effect["matters"]:
        return f"{head}: {what}: no effect; {score['kind'] or 'nothing said'}"
    shown = [f"{n}={effect[n]:.3g}" for n in ("tenfold", "worse", "slower") if effect[n] > 1]
    shown += [n for n in ("differ", "nonfinite", "ended") if effect[n]]
    marks = "".join(
        letter if score[name] else "-" if score[name] is False else " "
        for name, letter in (("found", "F"), ("placed", "P"), ("rank", "R"), ("step", "S"))
    )
    return f"{head}: {what}: [{', '.join(shown)}] {marks} {score['kind']} +{score['extra']}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.drawn", description=__doc__)
    add = parser.add_argument
    add("do", choices=("run", "show", "score"))
    add("folder", help="database, logs and results; a lab goes on where it ended")
    add("--part", choices=("tuning", "judging", "both"), default="tuning")
    add("--first", type=int, default=0, help="number to begin with")
    add("--count", type=int, default=20, help="numbers of that part")
    add("--healthy", action="store_true", help="healthy trainings only")
    add("--full-sampling", action="store_true", help="every step is sampled")
    add("--number", type=int, nargs="+", help="these; show: all that is known of them")
    add("--look-at-judging", action="store_true", help="show: spoils the judging part")
    add("--page", help="write the power curves there, as Markdown with pictures beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
