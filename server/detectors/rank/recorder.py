"""Which rank is in which collective, by PyTorch's flight recorder. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope.agent import wire
from rankscope.server.detectors.mechanisms.wording import agree, listing, ranks

_OVER = "completed"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a rank.

    Attributes:
        group: number and description of its process group.
        name: `gloo:all_reduce`, say.
        sequence: its number within the group, the same on all its ranks.
        state: `scheduled`, `started` or `completed`.
        shapes: of some of its inputs.
    """

    group: str
    name: str
    sequence: int
    state: str
    shapes: tuple[tuple[int, ...], ...] = ()


def collectives_of(given: object) -> tuple[Collective, ...]:
    """What an agent reports of its collectives, as far as it is what agents report."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return ()
    letters = wire.limits.STACK_CHARACTERS
    found = []
    for one in given[: wire.limits.COLLECTIVES]:
        if not isinstance(one, Mapping) or not isinstance(one.get("sequence"), int):
            continue
        group, name, state = (str(one.get(key, ""))[:letters] for key in ("group", "name", "state"))
        found.append(Collective(group, name, one["sequence"], state, _shapes(one.get("shapes"))))
    return tuple(found)


def _shapes(given: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return ()
    most = wire.limits.COLLECTIVE_SHAPES
    return tuple(
        tuple(n for n in shape[:most] if isinstance(n, int))
        for shape in given[:most]
        if isinstance(shape, Sequence) and not isinstance(shape, str)
    )


def compared(collectives: Mapping[int, Sequence[Collective]]) -> str:
    """Which ranks are in which collective, and which have not come to it; empty where none is.

    Args:
        collectives: rank -> its last ones, in the order in which they were begun; empty for a rank
            of which nothing is recorded.
    """
    inside: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    last: dict[tuple[str, int], int] = {}
    for rank, own in sorted(collectives.items()):
        for one in own:
            key = one.group, rank
            last[key] = max(last.get(key, -1), one.sequence)
        # What it began first it waits for first.
        first = next((one for one in own if one.state != _OVER), None)
        if first is not None:
            inside[first.group, first.sequence, first.name].append(rank)
    if not inside:
        return ""
    reported = []
    for (group, sequence, name), there in sorted(inside.items()):
        verb = agree(len(there), "is")
        text = f"{ranks(there)} {verb} in {name} {sequence} of group {group}"
        behind = [
            rank
            for rank in sorted(collectives)
            if rank not in there and last.get((group, rank), sequence) < sequence
        ]
        if behind:
            come = "has" if len(behind) == 1 else "have"
            text += f", to which {ranks(behind)} {come} not come"
        reported.append(text)
    return f"By PyTorch's flight recorder, {listing(reported, most=4)}."
