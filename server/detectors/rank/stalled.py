"""Ranks that wait for each other: who is where, and who keeps the others waiting."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

from rankscope.server.detectors.base import Check, Detector, Finding, Outcome, Status
from rankscope.server.detectors.policy import Policy, Seconds
from rankscope.server.detectors.wording import count, listing, ranks, sentences
from rankscope.server.window import Occurrence, RankLife, Window

_WAITING = "collective"


@dataclass(frozen=True, slots=True)
class StalledPolicy(Policy):
    """Thresholds of `rank.stalled`, in seconds.

    Attributes:
        deadlock: where every rank waits in a collective, and not all in the same.
        elsewhere: where a rank does something else: it may well come back from it.
    """

    deadlock: Seconds = 30.0
    elsewhere: Seconds = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is that does not end its step.

    Attributes:
        since: time at which its step had begun, by the server's clock.
    """

    step: int
    phase: str
    text: str
    since: float

    @property
    def waits(self) -> bool:
        """Whether it waits for others."""
        return self.phase == _WAITING


@dataclass(slots=True)
class StalledState:
    """Where each rank was when it told last that a step does not end."""

    places: dict[int, Place] = field(default_factory=dict)


class RankStalled(Detector[StalledState]):
    """No rank goes on, all are alive: they wait for a rank that is somewhere else.

    A rank whose step does not end for 10 s tells what it does and where in the user's code, read
    off its stack by the agent's own thread. A rank that ran out of data, skipped a collective or
    entered another one is where most ranks are not.

    Statistic:
        No rank has ended a step since, at least one waits in a collective, and not all wait in the
        same place of the same step. The guilty ranks are those outside the largest group that waits
        in one place (or that have said that they are done, where all others do); where no group is
        the largest, all are named. It counts from 120 s on, from
        30 s on where all wait in collectives (nobody can end that), and at once when a rank fails:
        its collective has timed out. Over as soon as steps end again.

    Severity:
        Critical; warning while a rank does something else and none has failed.

    Evidence:
        `places` (for each rank its step, phase and place), `seconds`, `failed_ranks`, `errors`.

    Source:
        deepspeedai/DeepSpeed#5794 (in TrainCheck's set), pytorch#38174 (uneven inputs), horovod#370
        (stall warning).
    """

    kinds: ClassVar[tuple[str, ...]] = ("rank.stalled",)
    lasting: ClassVar[str] = "each rank tells for itself where it waits, until it goes on"
    min_ranks: ClassVar[int] = 2

    policies: ClassVar[type[Policy]] = StalledPolicy
    policy: StalledPolicy

    def start(self) -> StalledState:
        """Nobody has stalled."""
        return StalledState()

    def advance(self, window: Window, state: StalledState) -> Outcome:
        """Puts together where the ranks are."""
        for event in window.events:
            if event.kind == "stalled":
                state.places[event.rank] = _place(event, window.now)
        # Who has ended a step since goes on.
        for life in window.lives:
            place = state.places.get(life.rank)
            if place is not None and life.last_step >= place.step:
                del state.places[life.rank]
        finding = self._judge(window, state)
        if finding is not None:
            return Outcome({"rank.stalled": Check(Status.OPEN, f"{finding.title}.")}, (finding,))
        if not window.lives:
            why = "No rank has been heard of yet."
            return Outcome({"rank.stalled": Check(Status.INSUFFICIENT_DATA, why)})
        why = "No rank keeps the others waiting."
        return Outcome({"rank.stalled": Check(Status.OK, why)})

    def _judge(self, window: Window, state: StalledState) -> Finding | None:
        alive = [life for life in window.lives if life.state != "finished"]
        if len(window.lives) < 2 or any(life.rank not in state.places for life in alive):
            return None
        places = {life.rank: state.places[life.rank] for life in alive}
        if not any(place.waits for place in places.values()):
            return None
        guilty, decided = _guilty(places)
        if not guilty:
            # All wait in one place: for one that has left, if any has.
            guilty = tuple(life.rank for life in window.lives if life.state == "finished")
        if not guilty:
            return None
        failed = [life for life in alive if life.state == "failed"]
        seconds = window.now - max(place.since for place in places.values())
        deadlock = all(place.waits for place in places.values())
        allowed = self.policy.deadlock if deadlock else self.policy.elsewhere
        if not failed and seconds < allowed:
            return None
        return _finding(window, places, guilty, decided, failed, seconds, deadlock)


def _place(event: Occurrence, now: float) -> Place:
    step = event.data.get("step", event.step + 1)
    seconds = event.data.get("seconds", 0.0)
    return Place(
        step=int(step) if isinstance(step, int | float) else event.step + 1,
        phase=str(event.data.get("phase", "")),
        text=event.text,
        since=now - (float(seconds) if isinstance(seconds, int | float) else 0.0),
    )


def _guilty(places: dict[int, Place]) -> tuple[tuple[int, ...], bool]:
    """Ranks outside the largest group that waits; all where two groups are as large."""
    together: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, place in places.items():
        if place.waits:
            together[place.step, place.text].append(rank)
    groups = sorted(together.values(), key=len, reverse=True)
    elsewhere = [rank for rank, place in places.items() if not place.waits]
    if elsewhere and len(groups) == 1:
        return tuple(sorted(elsewhere)), True
    if len(groups) > 1 and len(groups[0]) == len(groups[1]):
        return tuple(sorted(places)), False
    return tuple(sorted(set(places) - set(groups[0]))), True


def _finding(
    window: Window,
    places: dict[int, Place],
    guilty: tuple[int, ...],
    decided: bool,
    failed: list[RankLife],
    seconds: float,
    deadlock: bool,
) -> Finding:
    step = min(place.step for place in places.values())
    errors = sorted({life.error for life in failed if life.error})
    rest = tuple(sorted(set(places) - set(guilty)))
    done = tuple(rank for rank in guilty if rank not in places)
    title = (
        f"{ranks(rest).capitalize()} wait{'s' if len(rest) == 1 else ''} in step {step} for "
        f"{ranks(guilty)}, {_elsewhere(places, guilty)}"
        if decided
        else f"{ranks(guilty).capitalize()} wait for each other in step {step}"
    )
    broken = (
        f"{ranks([life.rank for life in failed]).capitalize()} failed after that, as is the end "
        f"of waiting in vain{f': {errors[0][:160].rstrip(chr(46))}' if errors else ''}."
        if failed
        else f"No step has ended for {seconds:.0f} s."
    )
    return Finding(
        kind="rank.stalled",
        severity="critical" if failed or deadlock else "warning",
        title=title,
        seen_step=step,
        last_step=max(window.last_step, step),
        first_step=step,
        ranks=guilty,
        cause=sentences(
            f"No rank ended step {step}, and all were alive: {_whereabouts(places)}. "
            f"{broken} Mostly a rank ran out of data, left the loop, skipped a collective, or "
            "entered one that the others do not.",
            f"{ranks(done).capitalize()} said to be done before." if done else "",
            "" if decided else "Nothing tells which one is wrong.",
        ),
        remedy=(
            "Look at the places above: every rank has to come to the same collectives in the same "
            "order. For data that end unevenly use `drop_last`, padding or "
            "`torch.distributed.algorithms.join.Join`; let all ranks decide together when to stop."
        ),
        clear_after=0,
        evidence={
            "places": {
                str(rank): {"step": place.step, "phase": place.phase, "place": place.text}
                for rank, place in sorted(places.items())
            },
            "seconds": round(seconds, 1),
            "failed_ranks": [life.rank for life in failed],
            "errors": errors[:3],
        },
    )


def _elsewhere(places: dict[int, Place], guilty: tuple[int, ...]) -> str:
    which = "which is" if len(guilty) == 1 else "which are"
    at = {places[rank].text for rank in guilty if rank in places}
    if len(at) == 1 and (place := at.pop()):
        return f"{which} at {place}"
    return f"{which} somewhere else"


def _whereabouts(places: dict[int, Place]) -> str:
    together: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    for rank, place in sorted(places.items()):
        together[place.step, place.phase, place.text].append(rank)
    told = []
    for (step, phase, text), held in sorted(together.items(), key=lambda item: -len(item[1])):
        does = {_WAITING: "in a collective", "idle": "in the user's code"}.get(phase, f"in {phase}")
        at = f" at {text}" if text else ""
        verb = "is" if len(held) == 1 else "are"
        told.append(f"{ranks(held)} {verb} {does}{at}, step {step}")
    return listing(told, most=4) if told else count(len(places), "rank")
