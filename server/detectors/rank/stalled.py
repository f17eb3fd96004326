"""Ranks that wait for each other: who is where, and who keeps the others waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import agree, ranks, sentences
from rankscope.server.detectors.policy import Policy, Seconds, Times
from rankscope.server.detectors.rank.places import (
    GOES_ON,
    Blame,
    Place,
    blame,
    described,
    place_of_event,
)
from rankscope.server.detectors.rank.recorder import compared
from rankscope.server.window import Check, RankLiveness, Window

_DURATION = "step_seconds"
# The estimate of a median moves by this share of itself towards each new step.
_GAIN = 0.1
# Ranks whose stacks are in the evidence: each takes up to 16 KB.
_STACKS = 4
# Letters of a place in a title.
_PLACE = 48


@dataclass(frozen=True, slots=True)
class StalledPolicy(Policy):
    """Thresholds of `rank.stalled`, in seconds.

    Attributes:
        deadlock: time without a step after which it is reported where every rank waits in a
            collective, and not all in the same.
        elsewhere: the same where a rank does something else: it may well come back from it.
        together: the same where all wait in one place: no rank of this run keeps them waiting.
        typical_steps: the same as a multiple of a step's usual time, where that is longer.
        critical_after: multiple of these times after which it is critical.
    """

    deadlock: Seconds = 30.0
    elsewhere: Seconds = 120.0
    together: Seconds = 300.0
    typical_steps: Times = 10.0
    critical_after: Times = 5.0


@dataclass(slots=True)
class StalledState:
    """Where each rank was when it reported last that a step does not end.

    Attributes:
        typical: what a step usually takes, seconds.
        begun: whether a step has ended.
    """

    places: dict[int, Place] = field(default_factory=dict)
    typical: float = 0.0
    begun: bool = False


class RankStalled(Detector[StalledState]):
    """No rank goes on, all are alive: they wait for a rank that is somewhere else.

    A rank whose step does not end for 10 s reports what it does and where in the user's code, read
    off its stack by the agent's own thread: in its first step, in its last one and in an evaluation
    too. A rank waits where it is in a collective, in a synchronisation with its device, or inside a
    forward or backward pass or a step of the optimizer, in which a data-parallel wrapper waits
    without a line of Python. A rank that loads data, evaluates, saves, is in code of the user's or
    makes one forward pass after the other, its steps being skipped, does not wait.

    Statistic:
        No rank has ended a step since, and at least one waits. The suspect ranks are those that do
        not wait; where all do, those outside the largest group that is in one place of one step,
        those that have come less far within the step, or those that have ended; where no group is
        the largest, all are named. It counts from 120 s on, from 30 s on where all wait in
        collectives (nobody can end that), from 300 s on where all wait in one place, never before
        10 times what a step usually takes, and at once when a rank fails: its collective has timed
        out. It is judged by the server's clock, whether anything arrives or not. Over as soon as
        steps end again.

    Severity:
        Critical; warning while a rank does something else and none has failed, for the first five
        times as long.

    Evidence:
        `places` (for each rank its step, phase and place), `waiting` (ranks that wait), `seconds`,
        `failed_ranks`, `errors`, and `stacks`: of the suspect ranks and of the first one that
        waits, at most four, for each thread its frames from the innermost outwards. `collectives`:
        of the same ranks the last ones by PyTorch's flight recorder, where it records (`group`,
        `name`, `sequence` within the group, `state`, `shapes`); the cause says which rank is in
        which collective, and which ranks have not come to it.

    Source:
        deepspeedai/DeepSpeed#5794 (in TrainCheck's set), pytorch#38174 (uneven inputs), horovod#370
        (stall warning).
    """

    kinds = ("rank.stalled",)
    lasting = "each rank reports for itself where it waits, until it goes on"
    wants = (_DURATION,)
    min_ranks = 2

    policy: StalledPolicy

    def advance(self, window: Window, state: StalledState) -> Outcome:
        """Puts together where the ranks are."""
        _learn_duration(window, state)
        # The last block of a run may hold no steps.
        state.begun = state.begun or window.last_step >= 0
        liveness = {life.rank: life for life in window.liveness}
        for event in window.events:
            life = liveness.get(event.rank)
            # What an earlier process of the rank reported went with it.
            if event.kind == "stalled" and life is not None and not event.at < life.first_seen:
                place = place_of_event(event, window.now, life.attempt)
                known_place = state.places.get(event.rank)
                same = known_place is not None and known_place.step == place.step
                if known_place is not None and same and known_place.phase != GOES_ON:
                    # Since when a step does not end changes only as more is known of it.
                    place = place.since_at_most(known_place.since)
                state.places[event.rank] = place
        # Who has ended a step since goes on.
        for rank, place in tuple(state.places.items()):
            life = liveness.get(rank)
            if life is None or life.attempt != place.attempt or life.last_step >= place.step:
                del state.places[rank]
        finding, check = self._judge(window, state)
        findings = () if finding is None else (finding,)
        return Outcome({"rank.stalled": check}, findings)

    def _judge(self, window: Window, state: StalledState) -> tuple[Finding | None, Check]:
        liveness = [life for life in window.liveness if life.rank < window.world_size]
        if not liveness:
            return None, _unknown("No rank has been heard of yet.")
        alive = [life for life in liveness if life.state != "finished"]
        standing = {one.rank: state.places[one.rank] for one in alive if one.rank in state.places}
        if not standing:
            return None, self._nobody_stands(window, state, alive)
        if len(liveness) < 2:
            return None, _unknown(f"Only one rank has been heard of: {described(standing)}.")
        others = [life for life in liveness if life.rank not in standing]
        if any(life.state == "running" for life in others):
            return None, self._some_go_on(window, standing, others)
        found = blame(standing, tuple(life.rank for life in others))
        failed = [life for life in alive if life.state == "failed"]
        seconds = window.now - max(place.since for place in standing.values())
        if not found.waiting:
            why = f"No rank waits for another; each is busy: {described(standing)}."
            return None, Check.ok(why)
        allowed = self._allowed(found, state)
        together = not found.suspects
        if together:
            found = Blame(tuple(standing), found.waiting, decided=False, deadlock=True)
        if seconds < allowed and (together or not failed):
            why = (
                f"No step has ended lately, but not yet for the {allowed:.0f} s after which this "
                f"is reported: {described(standing)}."
            )
            return None, _unknown(why)
        late = seconds >= allowed * self.policy.critical_after
        serious = bool(failed) or (found.deadlock and not together) or late
        finding = _finding(window, standing, found, failed, seconds, serious, together)
        return finding, Check.open(f"{finding.title}.")

    def _allowed(self, found: Blame, state: StalledState) -> float:
        policy = self.policy
        if not found.suspects:
            least = policy.together
        else:
            least = policy.deadlock if found.deadlock else policy.elsewhere
        return max(least, policy.typical_steps * state.typical)

    def _nobody_stands(
        self, window: Window, state: StalledState, alive: Sequence[RankLiveness]
    ) -> Check:
        if silent := self._silent(window, alive):
            return _unknown(f"Nothing is heard of {ranks(silent)}.")
        if not state.begun:
            return _unknown("No step has ended yet.")
        return Check.ok("No rank keeps the others waiting: their steps end.")

    def _some_go_on(
        self, window: Window, standing: Mapping[int, Place], others: Sequence[RankLiveness]
    ) -> Check:
        """Where some ranks stand and others do not: these end steps, or are not heard of."""
        if silent := self._silent(window, others):
            return _unknown(
                f"Nothing is heard of {ranks(silent)}, so that nobody knows what "
                f"{'it does' if len(silent) == 1 else 'they do'}; {described(standing)}."
            )
        return Check.ok("No rank keeps all others waiting: some ranks' steps end.")

    def _silent(self, window: Window, liveness: Sequence[RankLiveness]) -> list[int]:
        """Ranks of which nothing is known because they are not heard of."""
        return [
            life.rank
            for life in liveness
            if life.state == "running" and window.now - life.last_seen > self.policy.deadlock
        ]


def _learn_duration(window: Window, state: StalledState) -> None:
    if (durations := window.series.get(_DURATION)) is None:
        return
    for column in np.where(durations.present, durations.values, 0.0).T:
        longest = float(column.max())
        if longest > 0 and np.isfinite(longest):
            typical = state.typical or longest
            state.typical = typical * (1 + _GAIN * float(np.sign(longest - typical)))


def _unknown(why: str) -> Check:
    return Check.insufficient(why)


def _finding(
    window: Window,
    places: Mapping[int, Place],
    found: Blame,
    failed: Sequence[RankLiveness],
    seconds: float,
    serious: bool,
    together: bool,
) -> Finding:
    step = min(place.step for place in places.values())
    errors = sorted({life.error for life in failed if life.error})
    suspects, rest = found.suspects, found.others(places)
    ended = {life.rank: life for life in window.liveness if life.rank not in places}
    done = tuple(rank for rank in suspects if rank in ended and ended[rank].state == "finished")
    gone = tuple(rank for rank in suspects if rank in ended and ended[rank].state == "failed")
    if together:
        title = f"No rank ends step {step}: {ranks(suspects)} all wait in one place"
        if at := next(iter(places.values())).text:
            title += f", at {at[:_PLACE]}"
    elif found.decided:
        verb = agree(len(rest), "waits")
        title = (
            f"{ranks(rest).capitalize()} {verb} in step {step} for {ranks(suspects)}, "
            f"{_where(places, suspects, done, gone)}"
        )
    else:
        title = f"{ranks(suspects).capitalize()} wait for each other in step {step}"
    broken = (
        f"{ranks([life.rank for life in failed]).capitalize()} then failed, as happens when a "
        f"collective times out{f': {errors[0][:160].rstrip(chr(46))}' if errors else ''}."
        if failed
        else f"No step has ended for {seconds:.0f} s."
    )
    why = (
        "They all wait in one place. A collective is held up by the network, by a device, or by a "
        "process that Rankscope does not see."
        if together
        else "Usually a rank ran out of data, left the loop, skipped a collective, entered one "
        "that the others do not, or waits for something that does not come (a file, a "
        "lock, a download)."
    )
    they = "it was" if len(done) == 1 else "they were"
    return Incident.since(step, window.last_step).finding(
        kind="rank.stalled",
        severity="critical" if serious else "warning",
        title=title,
        ranks=suspects,
        cause=sentences(
            f"No rank ended step {step}, and all were alive: {described(places)}. {broken} {why}",
            f"{ranks(done).capitalize()} had already reported that {they} finished."
            if done
            else "",
            f"{ranks(gone).capitalize()} had failed before." if gone else "",
            "" if found.decided or together else "Nothing shows which one is wrong.",
            compared({rank: place.collectives for rank, place in places.items()}),
        ),
        remedy=(
            "Look at the places above: every rank has to come to the same collectives in the same "
            "order. For data that end unevenly use `drop_last`, padding or "
            "`torch.distributed.algorithms.join.Join`; let all ranks decide together when to stop."
        ),
        evidence={
            "places": {
                str(rank): {"step": place.step, "phase": place.phase, "place": place.text}
                for rank, place in sorted(places.items())
            },
            "waiting": list(found.waiting),
            "seconds": round(seconds, 1),
            "failed_ranks": [life.rank for life in failed],
            "errors": errors[:3],
            "stacks": {
                str(rank): {name: list(lines) for name, lines in places[rank].stacks.items()}
                for rank in (*suspects[: _STACKS - 1], *found.waiting[:1])
                if rank in places and places[rank].stacks
            },
            "collectives": {
                str(rank): [asdict(one) for one in places[rank].collectives]
                for rank in (*suspects[: _STACKS - 1], *found.waiting[:1])
                if rank in places and places[rank].collectives
            },
        },
    )


def _where(
    places: Mapping[int, Place], suspects: Sequence[int], done: Sequence[int], gone: Sequence[int]
) -> str:
    """Where the suspect ranks are, for the title."""
    which = "which is" if len(suspects) == 1 else "which are"
    there = [places[rank] for rank in suspects if rank in places]
    if done and not there:
        return f"{which} done"
    if gone and not there:
        return "which failed"
    at = {place.text for place in there}
    does = {place.does for place in there}
    if len(at) == 1 and (place := at.pop()):
        doing = f"{does.pop()} " if len(does) == 1 else ""
        return f"{which} {doing}at {place[:_PLACE]}"
    if {place.phase for place in there} == {GOES_ON}:
        return f"{which} {there[0].does}"
    return f"{which} somewhere else"
