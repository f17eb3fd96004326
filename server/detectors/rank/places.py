"""Where ranks are that do not end their step, and which of them the others wait for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rankscope.agent import wire
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, ranks
from rankscope.server.detectors.rank.recorder import Collective, collectives_of
from rankscope.server.window import Occurrence

# Certain waits: the agent saw the call.
_CERTAIN = ("collective", "device")
# What a step goes through, in this order. A data-parallel wrapper waits inside of these in C++, so
# that no Python frame shows it: DDP reduces gradients in the backward pass and broadcasts
# buffers in the forward pass, sharded optimizers gather parameters in their step.
_POSSIBLE = ("forward", "backward", "step")
# Of a rank that computes batch after batch, and whose steps do not come.
GOES_ON = "passes"
_DOES = {
    "collective": "in a collective",
    "device": "waiting for its device",
    "data": "loading data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "step": "in the optimizer's step",
    "scheduler": "in the scheduler",
    "checkpoint": "saving or loading a checkpoint",
    "evaluation": "evaluating",
    GOES_ON: "making forward passes without a step",
    "idle": "in the user's code",
    "": "in the user's code",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is that does not end its step.

    Attributes:
        phase: as the agent's `phase_of` names it.
        text: place in the user's code, for example `train (train.py:12)`.
        since: time at which its step had begun, by the server's clock.
        attempt: number of the rank's process.
        stacks: of its threads, that of the training thread first; each from the innermost frame
            outwards.
        collectives: its last ones, as PyTorch's flight recorder has them.
    """

    step: int
    phase: str
    text: str
    since: float
    attempt: int = 0
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether it waits for others, for certain."""
        return self.phase in _CERTAIN

    @property
    def waits(self) -> bool:
        """Whether it waits for others, as far as its stack shows."""
        return self.certain or self.phase in _POSSIBLE

    @property
    def does(self) -> str:
        """What it does, in words that follow "is"."""
        return _DOES.get(self.phase, f"in {self.phase}")

    @property
    def progress(self) -> tuple[int, int]:
        """How far it has come, of places that have an order."""
        return self.step, _POSSIBLE.index(self.phase) if self.phase in _POSSIBLE else 0

    def since_at_most(self, time: float) -> Place:
        """The same, known to stand for longer."""
        return replace(self, since=min(self.since, time))


@dataclass(frozen=True, slots=True)
class Blame:
    """Who waits for whom.

    Attributes:
        suspects: ranks that the others wait for; empty where all wait in one place.
        waiting: ranks that wait.
        decided: whether the suspects are distinguished from the others.
        deadlock: all wait in collectives: none can come back from it.
    """

    suspects: tuple[int, ...]
    waiting: tuple[int, ...]
    decided: bool
    deadlock: bool

    def others(self, places: Mapping[int, Place]) -> tuple[int, ...]:
        """Those that are not suspect."""
        return tuple(sorted(set(places) - set(self.suspects)))


def place_of_event(event: Occurrence, now: float, attempt: int) -> Place:
    """The place that a rank has reported with `stalled`.

    Args:
        now: when it did, where the event does not show.
        attempt: number of the rank's process.
    """
    step, seconds = event.data.get("step", event.step + 1), event.data.get("seconds", 0.0)
    at = now if math.isnan(event.at) else event.at
    return Place(
        step=int(step) if isinstance(step, int | float) else event.step + 1,
        phase=str(event.data.get("phase", "")),
        text=event.text,
        attempt=attempt,
        since=at - (float(seconds) if isinstance(seconds, int | float) else 0.0),
        stacks=_stacks(event.data.get("stacks")),
        collectives=collectives_of(event.data.get("collectives")),
    )


def _stacks(given: object) -> dict[str, tuple[str, ...]]:
    """What an agent says of its threads, as far as it is what agents say."""
    if not isinstance(given, Mapping):
        return {}
    characters = wire.limits.STACK_CHARACTERS
    return {
        str(name)[:characters]: tuple(
            str(line)[:characters] for line in lines[: wire.limits.STACK_FRAMES]
        )
        for name, lines in list(given.items())[: wire.limits.STACK_THREADS]
        if isinstance(lines, Sequence) and not isinstance(lines, str)
    }


def blame(places: Mapping[int, Place], finished: Sequence[int] = ()) -> Blame:
    """Which ranks keep the others waiting.

    Args:
        places: of all ranks that are alive, none of which ends its step.
        finished: ranks that have ended as they should.
    """
    elsewhere = tuple(sorted(rank for rank, place in places.items() if not place.waits))
    # Whoever is in a later step than a rank that does something else has passed what that one has
    # not come to yet: what is only possibly a wait is one for ranks that are not ahead of it.
    lead = max((places[rank].step for rank in elsewhere), default=-1)
    lowest = min((places[rank].step for rank in elsewhere), default=0)
    waiting = tuple(
        sorted(
            rank
            for rank, place in places.items()
            if place.certain or (place.waits and (not elsewhere or place.step >= lowest))
        )
    )
    if not waiting:
        return Blame((), (), decided=True, deadlock=False)
    if elsewhere:
        passed = {r for r in places if places[r].waits and places[r].step < lead} - set(waiting)
        return Blame(tuple(sorted({*elsewhere, *passed})), waiting, decided=True, deadlock=False)
    deadlock = all(place.certain for place in places.values())
    together: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    for rank, place in places.items():
        together[place.step, "" if place.certain else place.phase, place.text].append(rank)
    groups = sorted(together.values(), key=len, reverse=True)
    if len(groups) == 1:
        # All wait in one place: for one that has left, if any has.
        return Blame(tuple(sorted(finished)), waiting, decided=True, deadlock=deadlock)
    if len(groups[0]) > len(groups[1]):
        suspects = tuple(sorted(set(places) - set(groups[0])))
        return Blame(suspects, waiting, decided=True, deadlock=deadlock)
    if not any(place.certain for place in places.values()):
        # Of passes that follow each other, whoever has come less far is waited for.
        first = min(place.progress for place in places.values())
        least = tuple(sorted(r for r, place in places.items() if place.progress == first))
        if len(least) < len(places):
            return Blame(least, waiting, decided=True, deadlock=False)
    return Blame(tuple(sorted(places)), waiting, decided=False, deadlock=deadlock)


def described(places: Mapping[int, Place]) -> str:
    """Where each rank is: "rank 0 is in a collective at train (train.py:12), step 30"."""
    together: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    for rank, place in sorted(places.items()):
        together[place.step, place.does, place.text].append(rank)
    reported = []
    for (step, does, text), held in sorted(together.items(), key=lambda item: -len(item[1])):
        at = f" at {text}" if text else ""
        verb = agree(len(held), "is")
        reported.append(f"{ranks(held)} {verb} {does}{at}, step {step}")
    return listing(reported, most=4) if reported else count(len(places), "rank")
