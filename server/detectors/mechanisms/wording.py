"""How findings say things, so that all of them say them alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

_OF_MANY = {"is": "are", "was": "were", "has": "have", "does": "do"}


def ranks(numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0 and 3`, `ranks 0, 1 and 3`; long runs as `ranks 8-15`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts: list[str] = []
    for low, high in spans:
        if high - low >= 2:
            parts.append(f"{low}-{high}")
        else:
            parts += [str(n) for n in range(low, high + 1)]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {listing(parts)}"


def listing(items: Sequence[str], *, most: int = 12) -> str:
    """`a`, `a and b`, `a, b and c`; of many, the first ones and how many more."""
    if len(items) > most:
        return f"{', '.join(items[:most])} and {len(items) - most} more"
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def number(value: float) -> str:
    """Three significant digits, as a person would write them."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("infinity" if value > 0 else "-infinity")
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def count(amount: int, thing: str) -> str:
    """`1 step`, `1,200 steps`, `0 batches`."""
    return f"{amount:,} {thing if amount == 1 else plural(thing)}"


def plural(thing: str) -> str:
    """`steps`, `odd batches`, `entries`, `matrices`: of the last word, by its ending."""
    if thing.endswith("trix"):
        return f"{thing[:-1]}ces"
    if thing.endswith(("s", "x", "z", "ch", "sh")):
        return f"{thing}es"
    if thing.endswith("y") and thing[-2:-1] not in tuple("aeiou"):
        return f"{thing[:-1]}ies"
    return f"{thing}s"


def agree(amount: int, verb: str) -> str:
    """The verb, given as it goes with one (`is`, `takes`), as it goes with a number."""
    return verb if amount == 1 else _OF_MANY.get(verb) or verb.removesuffix("s")


def if_several(world_size: int, phrase: str, *, before: str = " ") -> str:
    """A phrase about all ranks (` of every rank`); nothing where the run has one process only."""
    return f"{before}{phrase}" if world_size > 1 else ""


def every(period: int) -> str:
    """`every step`, `every 8 steps`."""
    return "every step" if period == 1 else f"every {count(period, 'step')}"


def duration(seconds: float) -> str:
    """`51.2 ms`, `1.2 s`, `12 min`, `3.5 h`: the largest unit of which there are two or more."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{number(seconds / length)} {unit}"
    return f"{number(1000 * seconds)} ms" if seconds < 1 else f"{number(seconds)} s"


def size(amount: float) -> str:
    """`512 MB`, `1.4 GB`: bytes, in powers of 1,000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(amount) < 999.5:
            return f"{number(amount)} {unit}"
        amount /= 1000
    return f"{number(amount)} TB"


def percent(share: float) -> str:
    """A share as per cent."""
    return f"{100 * share:.0f} %"


def sentences(*parts: str) -> str:
    """The parts that there are, one after the other."""
    return " ".join(part for part in parts if part)
