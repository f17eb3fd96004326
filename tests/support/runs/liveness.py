"""Ranks that fall silent, stall or fail: evaluations by the clock, not by steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.server.window import Occurrence, RankLiveness, Series, Window


@dataclass(frozen=True)
class Timeline:
    """Evaluations once a second; what each rank last said is a function of time.

    Attributes:
        seconds: how long it goes.
        lives: the ranks' lives at a time.
        away: times at which the server does not evaluate.
        told: events that are reported, with the time at which they come.
        step_seconds: what every rank says that a step takes.
        config: what the ranks said of themselves at attach.
    """

    world_size: int
    seconds: int
    lives: Callable[[float], list[RankLiveness]]
    away: range = range(0)
    told: tuple[tuple[float, Occurrence], ...] = ()
    step_seconds: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict)

    def windows(self, cuts: Iterable[int] = ()) -> Iterator[Window]:
        """One a second; `cuts` mean nothing here."""
        evaluated = -1
        for second in range(self.seconds):
            if second in self.away:
                continue
            lives = self.lives(float(second))
            through = max([evaluated, *(life.last_step for life in lives)])
            steps = np.arange(evaluated + 1, through + 1, dtype=np.int64)
            evaluated = through
            ranks = np.array([life.rank for life in lives], dtype=np.int64)
            shape = len(ranks), len(steps)
            there = np.ones(shape, dtype=bool)
            yield Window(
                world_size=self.world_size,
                ranks=ranks,
                steps=steps,
                series={
                    "loss": Series(np.ones(shape), there),
                    "step_seconds": Series(np.full(shape, self.step_seconds), there),
                },
                liveness=tuple(lives),
                now=float(second),
                last_step=evaluated,
                config=self.config,
                events=tuple(event for at, event in self.told if int(at) == second),
            )


def silence(
    seed: int,
    *,
    ranks: int = 4,
    rank: int = 1,
    at: float = 60.0,
    back: float = 1e9,
    others: str = "wait",
    later: float = 0.0,
    seconds: int = 200,
    gap: float = 2.0,
    long_gap: float = 4.0,
    never: bool = False,
    away: Sequence[int] = (),
    hosts: int = 1,
    left: str = "",
    unsent: int = 0,
    data_parallel: bool = False,
) -> Timeline:
    """One rank says nothing more from a time on.

    Args:
        seed: not used; times are what they are.
        others: what the other ranks do: `wait` (heartbeats without progress), `go-on`, `fail`
            (3 s later), `finish` (at `at`), or `stop` (fall silent with it, or `later` seconds
            later).
        never: the rank is never heard of at all.
        away: first and last second of an absence of the server, in which no post arrives.
        left: state of two more ranks that the job had before it was started again without them.
        unsent: steps that the others, which finish, report beyond what it has reported.
        data_parallel: gradients are reduced at every step.
    """
    pause = range(away[0], away[1]) if away else range(0)

    def posted(time: float, until: float) -> float:
        """Time of the last post up to `time`, if posts end at `until`."""
        last = min(time, until)
        last -= last % gap
        while int(last) in pause and last > 0:
            last -= gap
        return max(last, 0.0)

    def lives(time: float) -> list[RankLiveness]:
        found = []
        if left:
            found = [RankLiveness(r, 0.0, 0.0, 36, state=left) for r in (ranks, ranks + 1)]
        for r in range(ranks):
            suspects = r == rank
            if suspects and never:
                continue
            state, error = "running", ""
            until = 1e9
            if suspects or others == "stop":
                until = at if suspects else at + later
            elif others == "fail" and time >= at + 3:
                state, error, until = "failed", "RuntimeError: Connection closed by peer", at + 3
            elif others == "fail-before" and time >= at - 20:
                state, error, until = "failed", "ValueError: no more data", at - 20
            elif others == "finish" and time >= at:
                state, until = "finished", at
            if suspects and time >= back:
                until = 1e9
            stopped = at if others in ("wait", "fail", "finish", "stop") else 1e9
            step = int(10 * posted(time, min(until, stopped if time < back else 1e9)))
            if not suspects and others in ("wait", "fail"):
                # Its last report was lost with it; the others got as far as they could without it.
                step = min(
                    int(10 * posted(time, until)), int(10 * at) + 3 if time < back else 10**9
                )
            if state == "finished":
                step += unsent
            found.append(
                RankLiveness(
                    rank=r,
                    first_seen=0.0,
                    last_seen=posted(time, until),
                    last_step=step,
                    state=state,
                    error=error,
                    phase="backward",
                    host=f"node{r * hosts // ranks}",
                    heartbeat_seconds=2.0,
                    longest_gap=long_gap,
                    typical_gap=gap,
                )
            )
        return sorted(found, key=lambda life: life.rank)

    config = {"data_parallel": {"broadcast_buffers": True}} if data_parallel else {}
    return Timeline(world_size=ranks, seconds=seconds, lives=lives, away=pause, config=config)


def stalled(
    seed: int,
    *,
    ranks: int = 4,
    rank: int = 1,
    elsewhere: str = "idle",
    waiting: str = "collective",
    back: float = 1e9,
    fails: float = 1e9,
    done: bool = False,
    first: int = 31,
    takes: float = 1.0,
    again: float = 1e9,
    seconds: int = 200,
) -> Timeline:
    """A step a second; from second 30 on all but one wait, in step 31.

    Args:
        elsewhere: phase of that one; `collective`: another one, `same`: where the others are.
        waiting: phase of the others.
        back: time from which on they all go on.
        fails: time at which the others' collective times out.
        done: it has said that it is done.
        first: the step in which they wait.
        takes: what a step takes, as the ranks report it, seconds.
        again: time at which all processes are replaced by new ones that begin ten steps earlier.
    """

    def lives(time: float) -> list[RankLiveness]:
        last = 30 if 30 <= time < back else int(min(time, 30) + max(time - back, 0))
        last = min(last, first - 1) if time < back else last
        anew = time >= again
        if anew:
            last = first - 10
        found = []
        for r in range(ranks):
            ended = "finished" if done and r == rank and time >= 31 else "running"
            state = "failed" if time >= fails and r != rank else ended
            began = again if anew else 0.0
            life = RankLiveness(r, began, time, last, state, error="timed out", attempt=int(anew))
            found.append(life)
        return found

    told = []
    for r in range(ranks):
        odd = r == rank and elsewhere != "same"
        place = "evaluate (train.py:40)" if odd else "reduce (train.py:12)"
        data = {"phase": elsewhere if odd else waiting, "step": first, "seconds": 10.0}
        if not (done and r == rank):
            told.append((41.0, Occurrence(r, first - 1, "stalled", place, data, 41.0)))
    return Timeline(
        world_size=ranks, seconds=seconds, lives=lives, told=tuple(told), step_seconds=takes
    )


def failing(
    seed: int,
    *,
    ranks: int = 3,
    errors: Mapping[int, str],
    after: Mapping[int, float] | None = None,
    finished: Sequence[int] = (),
    silent: Sequence[int] = (),
    at: float = 20.0,
    again: float = 1e9,
    restarts_left: int | None = None,
    seconds: int = 60,
) -> Timeline:
    """A step a second, until ranks fail in step 21.

    Args:
        errors: rank -> what it says that it failed of.
        after: rank -> seconds after `at`.
        finished: ranks that have ended before as they should.
        silent: ranks of which nothing is heard from then on.
        again: time at which those that failed are started again.
        restarts_left: how often the launcher will do so, as the ranks said at attach.
    """
    later = after or {}

    def lives(time: float) -> list[RankLiveness]:
        found = []
        for r in range(ranks):
            ends = at + later.get(r, 0.0) if r in errors else at
            state, error, seen, attempt = "running", "", time, 0
            if r in errors and time >= ends:
                state, error, seen = "failed", errors[r], ends
            elif r in finished and time >= at - 1:
                state, seen = "finished", at - 1
            elif r in silent and time >= at:
                seen = at
            if time >= again and state == "failed":
                state, error, seen, attempt = "running", "", time, 1
            last = int(min(time, at))
            found.append(RankLiveness(r, 0.0, seen, last, state, error=error, attempt=attempt))
        return found

    told = tuple(
        (
            at + later.get(r, 0.0),
            Occurrence(r, 21, "failed", "train (train.py:12)", {}, at + later.get(r, 0.0)),
        )
        for r in errors
    )
    config = {} if restarts_left is None else {"restarts_left": restarts_left}
    return Timeline(world_size=ranks, seconds=seconds, lives=lives, told=told, config=config)
