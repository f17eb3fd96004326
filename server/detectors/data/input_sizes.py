"""Ranks whose inputs are of another size than the others', from the start or since a step."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows, robust_sigma
from rankscope.server.detectors.mechanisms.wording import agree, number, ranks, sentences
from rankscope.server.window import Float64, Window

SERIES = "input_rms"
# Observations that say what is usual, at least and at most.
_LEAST, _BACK = 16, 64
# Consecutive observations beyond it: one odd batch, or two, are another finding.
_LASTS = 4
# A forgotten or doubled normalisation is a factor of 2 or more: from pixels of 0 to 1 to a standard
# deviation of 1 it is 2 to 4, from 0 to 255 it is 255.
_FACTOR = 2.0
# Standard deviations, of each of the consecutive observations.
_SIGMAS = 8.0
# Sampled elements scatter by so much at least.
_FLOOR = 0.02
# Of the shift, what the other ranks may have moved in the same direction or any.
_OTHERS = 1 / 3
# Times the size of the other ranks' inputs from the start on, of one rank among three or more that
# else agree, and between two ranks: shards of different kinds of data come to 2 or 3, a forgotten
# division by 255 to 255.
_APART, _APART_OF_TWO = 5.0, 20.0
# Share of that distance within which the other ranks agree with each other, and where it ends.
_AGREE, _ENDS = 1 / 3, 1 / 2
# How often the size is reckoned anew.
_REFRESH = 16


@dataclass(frozen=True, slots=True)
class Rescaled:
    """Ranks whose inputs are this many times as large as they were, or as the other ranks'.

    Attributes:
        usual: what they were before, or what the others' are.
        begun: whether they have been so from the start.
    """

    ranks: tuple[int, ...]
    factor: float
    usual: float
    begun: bool = False


@dataclass(slots=True)
class Group:
    """What is known of the ranks that read batches of one kind of data.

    Attributes:
        past: steps and logarithms of their sizes, float64 [R] each, oldest first.
        last: the newest ones, which are held against those, with their steps.
        usual, sigma: median and scatter of `past` by rank.
    """

    members: tuple[int, ...]
    past: deque[tuple[int, Float64]] = field(default_factory=lambda: deque(maxlen=_BACK))
    last: deque[tuple[int, Float64]] = field(default_factory=deque)
    usual: Float64 | None = None
    sigma: Float64 | None = None
    fresh: int = 0
    watch: Watch[Rescaled] = field(default_factory=lambda: Watch(clear_after=8))
    apart: Watch[Rescaled] = field(default_factory=lambda: Watch(clear_after=8))
    begun: tuple[int, ...] = ()

    def take(self, step: int, sizes: Float64) -> None:
        """The next observation of all members, positive numbers."""
        self.last.append((step, np.log(sizes)))
        if len(self.last) < _LASTS:
            return
        self._beside_the_others(step)
        found = self._shifted()
        if found is None:
            self.watch.good(step)
        else:
            self.watch.bad(step, found, first_step=self._onset(found))
        oldest = self.last.popleft()
        # What has shifted does not become usual while it lasts.
        if found is None:
            self.past.append(oldest)
            self.fresh += 1

    def _beside_the_others(self, step: int) -> None:
        """Whether a rank's inputs have been of another size than the others' from the start."""
        if self.fresh == _LEAST and self.usual is None and not self.begun:
            place = self._odd_one(np.stack([values for _, values in self.past]), 1.0)
            if place is not None:
                # Of two, nobody can say which is right.
                odd = [place] if len(self.members) > 2 else [0, 1]
                self.begun = tuple(self.members[n] for n in odd)
        if not self.begun:
            return
        rows = np.stack([values for _, values in self.last])
        place = self._odd_one(rows, _ENDS)
        if place is None or self.members[place] not in self.begun:
            self.apart.good(step)
            return
        levels = np.median(rows, axis=0)
        others = float(np.median(np.delete(levels, place)))
        factor = math.exp(float(levels[place]) - others)
        found = Rescaled(self.begun, factor, math.exp(others), begun=True)
        onset = (
            step if self.apart.found else self._since(place, 0.5 * (float(levels[place]) - others))
        )
        self.apart.bad(step, found, first_step=onset)

    def _since(self, place: int, half: float) -> int:
        """First step from which on a rank's inputs lie beyond this distance from the others'."""
        onset = self.last[0][0]
        for step, values in reversed(self.past):
            if (values[place] - np.median(np.delete(values, place))) / half < 1:
                break
            onset = step
        return onset

    def _odd_one(self, rows: Float64, share: float) -> int | None:
        """Place of the one whose logarithms, [N, R], lie apart from all others', which agree."""
        levels = np.median(rows, axis=0)
        order = np.argsort(levels)
        least = math.log(_APART_OF_TWO if len(levels) == 2 else _APART) * share
        if len(levels) == 2:
            return int(order[1]) if levels[order[1]] - levels[order[0]] > least else None
        for place, rest in ((order[-1], order[:-1]), (order[0], order[1:])):
            others = levels[rest]
            distance = np.abs(levels[place] - others).min()
            if distance > least and np.ptp(others) <= _AGREE * distance:
                return int(place)
        return None

    def _onset(self, found: Rescaled) -> int:
        """First of the consecutive observations; some came before it was known what is usual."""
        onset, columns = self.last[0][0], np.isin(self.members, found.ranks)
        assert self.usual is not None
        half = 0.5 * math.log(found.factor)
        for step, values in reversed(self.past):
            deviations = (values - self.usual)[columns]
            if not (deviations / half > 1).all():
                break
            onset = step
        return onset

    def _shifted(self) -> Rescaled | None:
        if len(self.past) < _LEAST:
            return None
        if self.usual is None or self.sigma is None or self.fresh >= _REFRESH:
            past = np.stack([values for _, values in self.past])
            self.usual = np.median(past, axis=0)
            scatter = [robust_sigma(column - np.median(column)) for column in past.T]
            self.sigma = np.maximum(scatter, _FLOOR)
            self.fresh = 0
        deviations = np.stack([values for _, values in self.last]) - self.usual
        moved: Float64 = np.where(
            (deviations > 0).all(axis=0) | (deviations < 0).all(axis=0),
            np.abs(deviations).min(axis=0),
            0.0,
        )
        far = moved > np.maximum(_SIGMAS * self.sigma, math.log(_FACTOR))
        if not far.any() or 2 * far.sum() > len(far):
            return None  # where most have moved, it is the data
        others = np.abs(np.median(deviations[:, ~far], axis=0))
        if others.max() > _OTHERS * moved[far].min():
            return None
        who = tuple(rank for rank, one in zip(self.members, far.tolist(), strict=True) if one)
        worst = int(np.argmax(np.where(far, moved, 0.0)))
        factor = math.exp(float(np.median(deviations[:, worst])))
        return Rescaled(who, factor, math.exp(float(self.usual[worst])))


@dataclass(slots=True)
class InputSizes:
    """Follows the sizes of all ranks' inputs."""

    groups: dict[tuple[int, ...], Group] = field(default_factory=dict)

    def take(self, window: Window) -> list[Finding]:
        """Goes through a window; what was found."""
        steps, rows = rank_rows(window, SERIES)
        for members in window.data_parallel if len(steps) else ():
            if len(members) < 2:
                continue
            group = self.groups.setdefault(members, Group(members))
            held = rows[:, np.isin(window.ranks, members)]
            if held.shape[1] != len(members):
                continue
            for row in np.flatnonzero((np.isfinite(held) & (held > 0)).all(axis=1)).tolist():
                group.take(int(steps[row]), held[row])
        return [
            _finding(episode)
            for group in self.groups.values()
            for watch in (group.watch, group.apart)
            for episode in watch.take(window.last_step)
        ]


def _title(episode: Episode[Rescaled]) -> str:
    facts = episode.facts
    times = facts.factor if facts.factor > 1 else 1 / facts.factor
    size = "larger" if facts.factor > 1 else "smaller"
    if facts.begun:
        if len(facts.ranks) > 1:
            return (
                f"The inputs of {ranks(facts.ranks)} differ in size by a factor of {number(times)}"
            )
        return (
            f"The inputs of {ranks(facts.ranks)} are {number(times)} times {size} than the others'"
        )
    return (
        f"The inputs of {ranks(facts.ranks)} are {number(times)} times {size} since step "
        f"{episode.first_step}"
    )


def _finding(episode: Episode[Rescaled]) -> Finding:
    facts = episode.facts
    cause, remedy = (_beside if facts.begun else _moved)(facts, episode.first_step)
    return episode.finding(
        kind="data.outlier",
        key=f"inputs:{'beside:' if facts.begun else ''}{facts.ranks[0]}",
        severity="warning",
        title=_title(episode),
        ranks=facts.ranks,
        stage="batch",
        cause=sentences(
            cause,
            "Layers that normalise hide this from the loss; running statistics of batch norm, and "
            "so evaluations and what is saved, suffer from it.",
        ),
        remedy=remedy,
        evidence={"factor": facts.factor, "usual": facts.usual},
    )


def _moved(facts: Rescaled, step: int) -> tuple[str, str]:
    """Cause and remedy of inputs that are of another size than they were."""
    who = ranks(facts.ranks)
    return (
        f"The inputs of {who} had a root mean square of {number(facts.usual)} before step "
        f"{step} and have had {number(facts.factor)} times that since; the other ranks' "
        f"inputs are as before. {who.capitalize()} {agree(len(facts.ranks), 'normalises')} "
        "them differently, twice or not at all, or reads other data.",
        f"Print mean and standard deviation of a batch of {who} and of another rank, and "
        f"compare the transforms, their settings and the files of {who} from step {step} on.",
    )


def _beside(facts: Rescaled, step: int) -> tuple[str, str]:
    """Cause and remedy of inputs that are of another size than the other ranks'."""
    who = ranks(facts.ranks)
    whose = f"of {who}" if len(facts.ranks) == 1 else "of one of the two"
    return (
        f"Since step {step} the inputs {whose} have had {number(facts.factor)} times the root "
        f"mean square of the other ranks', which is {number(facts.usual)}. They are normalised "
        "differently, twice or not at all, decoded otherwise, or are other data.",
        f"Print mean and standard deviation of a batch of {who} and of another rank, and "
        "compare the transforms, their settings, the versions of what decodes the files, and "
        "the files themselves.",
    )
