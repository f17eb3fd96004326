"""`rankscope compare A B`: two runs side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rankscope.server.commands import client
from rankscope.server.detectors.mechanisms.wording import agree, ranks

_MOST_SETTINGS = 40
_LONGEST = 60
# All digests of two long runs of many ranks are read: seconds, or minutes.
_PATIENCE_S = 300.0


@client.command
def compare(argv: Sequence[str]) -> int:
    """Prints what distinguishes two runs."""
    parser = client.parser(
        "compare",
        "Shows two runs side by side: configuration, verdicts, alerts, final values, and the first "
        "step and tensor at which they differ, rank by rank.",
    )
    parser.add_argument("a", metavar="A", type=client.run_id, help="id of a run")
    parser.add_argument("b", metavar="B", type=client.run_id, help="id of another one")
    options = parser.parse_args(argv)
    runs = {"runs": [options.a, options.b]}
    found = client.server_of(options).get("/compare", runs, timeout=_PATIENCE_S)
    client.show(found, options, lines)
    return client.OK


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The answer of `GET /compare` as lines of text."""
    names = [run["id"] for run in found["runs"]]
    rows = [("RUN", "PROJECT", "STATE", "RANKS", "LAST STEP", "VERDICT")]
    for run in found["runs"]:
        step = "-" if run["last_step"] < 0 else str(run["last_step"])
        size = f"{len(run['ranks'])}/{run['world_size']}"
        rows.append((run["id"], run["project"], run["state"], size, step, run["verdict"]))
    yield from client.table(rows)
    yield from _bits(found["bits"])
    yield from _configuration(found["configuration"], names)
    yield from _checks(found["checks"], names)
    yield from _alerts(found["alerts"], names)
    yield from _metrics(found["metrics"], names)


def _bits(bits: dict[str, Any]) -> Iterator[str]:
    yield from ("", "Bits, rank by rank", f"  {bits['summary']}")
    if bits["state"] != "not_compared":
        yield from (f"  not compared: {text}" for text in bits["not_compared"])
    first = bits["first"]
    if bits["same_seed"] is None and first is not None and first["after"] is None:
        yield "  Neither configuration names a seed: with different ones this is to be expected."


def _configuration(difference: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    differing = difference["differing"]
    equal = f"{difference['equal']} {'is' if difference['equal'] == 1 else 'are'} the same"
    yield ""
    yield f"Configuration: {len(differing)} {agree(len(differing), 'differs')}, {equal}"
    if not differing:
        return
    rows = [("", *names)]
    for one in differing[:_MOST_SETTINGS]:
        rows.append((one["key"], *(_value(value) for value in one["values"])))
    yield from _indented(client.table(rows))
    if len(differing) > _MOST_SETTINGS:
        yield f"  and {len(differing) - _MOST_SETTINGS} more: --json has all of them"


def _checks(differing: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    if not differing:
        return
    yield from ("", "Checks that came to something else")
    rows = [("", *names)]
    rows += [(c["name"], *((s or "-").replace("_", " ") for s in c["states"])) for c in differing]
    yield from _indented(client.table(rows))


def _alerts(kinds: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    yield ""
    if not kinds:
        yield "Alerts: none in either run"
        return
    yield "Alerts"
    rows = [("", *names)]
    rows += [(kind["kind"], *(_of_kind(one) for one in kind["runs"])) for kind in kinds]
    yield from _indented(client.table(rows))


def _of_kind(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    times = f"{found['count']} x " if found["count"] > 1 else ""
    who = f", {ranks(found['ranks'])}" if found["ranks"] else ""
    return f"{times}{found['severity']} from step {found['first_step']}{who}"


def _metrics(metrics: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    yield ""
    if not metrics:
        yield "Metrics: none that both have"
        return
    yield "Metrics, means over the ranks"
    rows = [("", *(f"{name}, at its end" for name in names), "differs from", "largest difference")]
    for one in metrics:
        first, largest = one["first_differing"], one["largest_step"]
        differs = "nowhere" if first is None else f"step {first}"
        if not one["steps"]:
            differs = "no common step"
        apart = "-"
        if largest is not None:
            pair = " and ".join(_number(v) for v in one["at_largest"])
            apart = f"{pair} at step {largest}"
        rows.append((one["metric"], *(_number(v) for v in one["final"]), differs, apart))
    yield from _indented(client.table(rows))


def _indented(rows: Iterable[str]) -> Iterator[str]:
    return (f"  {row}" for row in rows)


def _number(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.6g}"


def _value(value: Any) -> str:
    text = "-" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
