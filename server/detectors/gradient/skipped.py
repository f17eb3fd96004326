"""Passes whose gradient is not finite and with which no optimizer has stepped: whose it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import count, listing, ranks, sentences
from rankscope.server.window import Window

EVENT = "gradient.skipped"
KEY = "skipped"
# Steps in which a loss scaler searches for its first scale; see `amp.scale_collapse`.
_CALIBRATION = 50
# Without a loss scaler a gradient is never infinite in the ordinary course of things: the third
# time is no accident of one batch.
_AGAIN = 3
# With one, the scale is then a sixteenth of what it was when it first happened: what made it
# overflow would have to be sixteen times as large, on the same one of W ranks each time (1 / W^4).
_AGAIN_SCALED = 5
# A thousandth of the scale: soon it is gone.
_GONE = 10
# A scale grows by a factor of two, and is not exactly what it was after rounding.
_GROWN = 1.5
_MOST_NAMES = 20
# Steps without another one after which it is over, and twice as many as lay between two so far.
_CLEAR = 64


@dataclass(slots=True)
class Skip:
    """One pass.

    Attributes:
        step: the step that it would have led to.
        held: rank -> its own gradients that were not finite, as far as they are named.
        clean: ranks whose own gradients were finite.
    """

    step: int
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)
    clean: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Skips:
    """Those of a run.

    Attributes:
        passes: by step and number within the step, those since the last one that was ordinary.
        scaled: whether there is a loss scaler.
        begin, last_step: first and last step of the run.
    """

    passes: dict[tuple[int, int], Skip] = field(default_factory=dict)
    scaled: bool = False
    begin: int = -1
    last_step: int = -1
    _counts: dict[tuple[int, int], int] = field(default_factory=dict)
    # Loss scale: step -> the smallest of the ranks, of the last steps at which it changed.
    _scales: list[tuple[int, float]] = field(default_factory=list)

    def take(self, window: Window) -> None:
        """Takes what the ranks report, and the loss scale."""
        self.last_step = max(self.last_step, window.last_step)
        if self.begin < 0 and len(window.steps):
            self.begin = int(window.steps[0])
        series = window.series.get("amp_scale")
        if series is not None:
            self.scaled = True
            for column in np.flatnonzero(series.present.any(axis=0)).tolist():
                values = series.values[series.present[:, column], column]
                scale = float(values.min())
                if not self._scales or scale != self._scales[-1][1]:
                    self._scales.append((int(window.steps[column]), scale))
            del self._scales[:-64]
        for event in window.events:
            if event.kind != EVENT:
                continue
            # Before the first step that is not skipped no scale is posted.
            self.scaled |= bool(event.data.get("scaler"))
            place = event.rank, event.step
            number = self._counts[place] = self._counts.get(place, -1) + 1
            skip = self.passes.setdefault((event.step, number), Skip(event.step))
            names = event.data.get("tensors", ())
            if event.data.get("count"):
                held = names if isinstance(names, list | tuple) else ()
                skip.held[event.rank] = tuple(str(n) for n in held)
            elif event.data.get("whole"):
                skip.clean.add(event.rank)
        self._forget_ordinary()

    def _forget_ordinary(self) -> None:
        """Drops what a loss scaler meets in the ordinary course of things."""
        if not self.scaled:
            return
        for key in [k for k in self.passes if self._is_ordinary(k[0])]:
            del self.passes[key]

    def _is_ordinary(self, step: int) -> bool:
        before = [scale for at, scale in self._scales if at < step]
        grown = len(before) > 1 and before[-1] > _GROWN * before[-2]
        return step < self.begin + _CALIBRATION or grown

    def episodes(self, ranks_of_run: Sequence[int]) -> list[Episode]:
        """Passes in a row for which the gradient was not finite on the same ranks."""
        found: list[Episode] = []
        for key in sorted(self.passes):
            skip = self.passes[key]
            who = frozenset(skip.held)
            # What overflows everywhere is the scaler's business.
            if not who or (self.scaled and len(who) >= len(ranks_of_run)):
                continue
            if found and found[-1].suspects & who:
                found[-1].suspects &= who
                found[-1].skips.append(skip)
            else:
                found.append(Episode(who, [skip]))
        return found

    def findings(self, window: Window) -> list[Finding]:
        """What it comes to."""
        everyone = window.ranks.tolist()
        return [_finding(one, scaled=self.scaled) for one in self.episodes(everyone)]


@dataclass(slots=True)
class Episode:
    """Passes of which each was spoilt on the same ranks.

    Attributes:
        suspects: the ranks.
        skips: the passes, in their order.
    """

    suspects: frozenset[int]
    skips: list[Skip]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Tensors that held such values on the suspects, most often named first.

        Of equally often named ones those first that a backward pass comes to first.
        """
        named: Counter[str] = Counter()
        order: dict[str, None] = {}
        for skip in self.skips:
            for rank in self.suspects:
                order |= dict.fromkeys(skip.held[rank])
                named.update(set(skip.held[rank]))
        return tuple(sorted(order, key=lambda name: -named[name]))[:_MOST_NAMES]


def _finding(episode: Episode, *, scaled: bool) -> Finding:
    who, names, known = tuple(sorted(episode.suspects)), episode.tensors, episode.skips
    step, times = known[0].step, len(known)
    gap = max((b.step - a.step for a, b in pairwise(known)), default=0)
    serious = times >= (_AGAIN_SCALED if scaled else _AGAIN)
    severity = "warning" if serious else "info"
    if scaled and times >= _GONE:
        severity = "critical"
    clean = tuple(sorted(set().union(*(skip.clean for skip in known)) - {*who}))
    once = "once" if times == 1 else f"{times:,} times"
    skipper = "the loss scaler" if scaled else "the trainer"
    return Incident.since(step, known[-1].step, clear_after=_CLEAR + 2 * gap).finding(
        kind="gradient.nonfinite",
        key=f"{KEY}:{step}",
        severity=severity,
        title=(
            f"{ranks(who).capitalize()} computed a gradient that is not finite {once} since "
            f"step {step}; these steps were skipped"
        ),
        ranks=who,
        tensors=names,
        cause=sentences(
            f"At step {step} the gradient that {ranks(who)} computed was not finite; the "
            f"reduction carries that to every rank, and {skipper} skipped the step on all of "
            f"them. In all {count(times, 'pass')} of which it is known, it was "
            f"{'the same rank' if len(who) == 1 else 'these ranks'}.",
            f"Such values are in {listing(names, most=4)}." if names else "",
            f"The own gradients of {ranks(clean)} were finite." if clean else "",
            "An overflow now and then is what a loss scaler is there for."
            if scaled and not serious
            else "",
        ),
        remedy=(
            f"Look at the batches of {ranks(who)} (values that are not finite, empty samples, "
            "a logarithm or division by 0) and at the device: nothing is learnt from a step "
            "that is skipped, and every rank loses its batch with it."
        ),
        evidence={
            "times": times,
            "steps": [skip.step for skip in known[:_MOST_NAMES]],
            "scaled": scaled,
            "finite_on": list(clean),
        },
    )


def whose(skips: Skips, world: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...], str]:
    """Ranks, tensors and a sentence for an alert about skipped steps; nothing where unknown."""
    episodes = skips.episodes(world)
    times = sum(len(one.skips) for one in episodes)
    if len(episodes) != 1 or times < 2:
        return (), (), ""
    who, names = tuple(sorted(episodes[0].suspects)), episodes[0].tensors
    where = f" (in {listing(names, most=3)})" if names else ""
    text = (
        f"In all {count(times, 'pass')} of which it is known, the gradient was not finite on "
        f"{ranks(who)} before the reduction{where}."
    )
    return who, names, text
