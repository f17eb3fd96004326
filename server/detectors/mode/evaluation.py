"""Training in evaluation mode: `model.train()` was forgotten, on all ranks or on some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import agree, count, if_several, listing, ranks
from rankscope.server.detectors.policy import Count, Policy
from rankscope.server.window import Check, Window

_KIND = "mode.evaluation"
_EVENT = "mode.changed"
_SERIES = "modules_in_eval"
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class ModePolicy(Policy):
    """Thresholds of `mode.evaluation`.

    Attributes:
        looks: consecutive sampled steps that were taken in evaluation mode, before it is reported;
            a trainer may take a single one so on purpose.
    """

    looks: Count = 3


@dataclass(frozen=True, slots=True)
class Modes:
    """What a rank has said of its modules.

    Attributes:
        step: since when it is so.
        whole: the whole model is in evaluation mode.
        names: of mode-dependent modules in evaluation mode, the first 200; `count` `of` them are.
        normalization, dropout, own: how many of each sort these are.
        new: of the normalizations, how many have statistics that no batch went into; `new_trained`:
            how many of these have weights that are trained.
    """

    step: int
    whole: bool
    names: tuple[str, ...]
    count: int
    of: int
    normalization: int
    dropout: int
    own: int
    new: int
    new_trained: int

    @classmethod
    def read(cls, step: int, data: Mapping[str, Any]) -> Modes:
        """Of an event."""
        numbers = ("count", "of", "normalization", "dropout", "own", "new", "new_trained")
        reported = data.get("names", ())
        names = tuple(str(n) for n in reported) if isinstance(reported, list | tuple) else ()
        return cls(step, bool(data.get("whole")), names, *(_whole(data.get(n)) for n in numbers))

    @property
    def held(self) -> tuple[bool, int, tuple[str, ...]]:
        """What is compared between ranks."""
        return self.whole if self.of else False, self.count, self.names


@dataclass(slots=True)
class Evaluating:
    """Steps in evaluation mode.

    Attributes:
        since: step from which it has been so.
        by_rank: the ranks that take them -> what they said.
        disagree: other ranks take theirs in another mode.
        undecided: half of the ranks do, and nothing shows which half is wrong.
        from_start: it has been so since the first sample.
        names: the modules that are.
    """

    since: int
    by_rank: Mapping[int, Modes]
    disagree: bool
    undecided: bool
    from_start: bool
    names: tuple[str, ...]


@dataclass(slots=True)
class ModeState:
    """What is remembered.

    Attributes:
        reported: rank -> what it said, in the order of the steps.
        first: rank -> the first of it: modules in evaluation mode then are meant to be.
        bad: consecutive samples, and the step of the first.
    """

    reported: dict[int, list[Modes]] = field(default_factory=dict)
    first: dict[int, Modes] = field(default_factory=dict)
    samples: int = 0
    compared: int = 0
    bad: int = 0
    bad_since: int = 0
    watch: Watch[Evaluating] = field(default_factory=lambda: Watch(clear_after=0))


class EvaluationMode(Detector[ModeState]):
    """Steps are taken while the model, or a part of it, is in evaluation mode.

    `model.train()` was forgotten after an evaluation, on all ranks or on the one that evaluates.
    Dropout is off then, and batch norm uses its running statistics and no longer updates them.

    Statistic:
        The mode of the mode-dependent modules (dropout, normalization with running statistics,
        modules of the user's own that ask for `self.training`) at training steps. Wrong are, at 3
        consecutive sampled steps: the whole model in evaluation mode; modules in evaluation mode
        that were not at the first step; ranks that hold the same model and differ. Modules in
        evaluation mode from the first step on are meant to be (a frozen backbone, a teacher), but
        for normalizations whose weights are trained by statistics of no batch.

    Severity:
        Warning. Info for normalization alone, which is frozen on purpose as often as not (in the
        midst of a run, or with the whole model from its start), unless it is new and normalizes by
        statistics of no batch at all; and for modules of the user's own alone, as what they do with
        their mode is not known, unless the whole model evaluates that trained before.

    Evidence:
        `modules` (in evaluation mode), `in_evaluation` `of` the mode-dependent ones, `whole_model`,
        `by_rank` (rank -> how many).

    Source:
        PyTorch's documentation of `Module.train` and `Module.eval`.
    """

    kinds = (_KIND,)
    lasting = "a mode stays as it is until something sets it"
    wants = (_SERIES,)

    policy: ModePolicy

    def advance(self, window: Window, state: ModeState) -> Outcome:
        """Follows what ranks said at the steps at which their modules were sampled."""
        for event in sorted(window.events, key=lambda e: e.step):
            if event.kind == _EVENT:
                modes = Modes.read(event.step, event.data)
                state.reported.setdefault(event.rank, []).append(modes)
                state.first.setdefault(event.rank, modes)
        for step, row in zip(*rank_rows(window, _SERIES), strict=True):
            there = [int(r) for r in window.ranks[~np.isnan(row)]]
            self._judge(window, state, int(step), there)
        findings = tuple(_finding(e, window) for e in state.watch.take(window.last_step))
        return Outcome({_KIND: _check(state)}, findings)

    def _judge(self, window: Window, state: ModeState, step: int, there: list[int]) -> None:
        state.samples += 1
        now = {r: m for r in there if (m := _at(state.reported.get(r, []), step)) is not None}
        found = self._disagreeing(window, state, now) or _together(state, now)
        if found is None:
            # Ranks that were not examined may still be in evaluation mode.
            known = state.watch.current
            if known is None or set(known.facts.by_rank) & set(now) or not known.holding:
                state.bad = 0
                state.watch.good(step)
            return
        state.bad_since = state.bad_since if state.bad else step
        state.bad += 1
        if state.bad >= self.policy.looks:
            first_step = min(found.since, state.bad_since)
            episode = state.watch.bad(step, found, first_step=first_step)
            if set(found.by_rank) >= set(episode.facts.by_rank):
                episode.facts = found

    def _disagreeing(
        self, window: Window, state: ModeState, now: Mapping[int, Modes]
    ) -> Evaluating | None:
        """Ranks that differ from those that hold the same model."""
        for group in window.replicas:
            held = {r: now[r] for r in group if r in now}
            if len(held) < 2:
                continue
            state.compared += 1
            alike: dict[Any, list[int]] = {}
            for rank, modes in held.items():
                alike.setdefault(modes.held, []).append(rank)
            if len(alike) == 1:
                continue
            sizes = sorted((len(same) for same in alike.values()), reverse=True)
            undecided = sizes[0] == sizes[1]
            most = max(alike.values(), key=len)
            if undecided and (as_before := _as_at_first(state, held)):
                undecided, most = False, as_before
            # Those in evaluation mode, where they are few; where they are most, the others differ.
            suspects = sorted(held if undecided else set(held) - set(most))
            names = {n for m in held.values() for n in m.names}
            common = set.intersection(*(set(m.names) for m in held.values()))
            differing = tuple(sorted(names - common)) or tuple(sorted(names))
            return Evaluating(
                max(m.step for m in held.values()),
                {r: held[r] for r in suspects},
                True,
                undecided,
                False,
                _ordered(held, differing),
            )
        return None


def _as_at_first(state: ModeState, held: Mapping[int, Modes]) -> list[int]:
    """Ranks that are in the mode in which all began; empty where they began in different ones."""
    if len({state.first[rank].held for rank in held}) > 1:
        return []
    return [rank for rank, modes in held.items() if modes.held == state.first[rank].held]


def _together(state: ModeState, now: Mapping[int, Modes]) -> Evaluating | None:
    """Ranks that take their steps in evaluation mode, or in parts of it that are not meant."""
    wrong: dict[int, Modes] = {}
    names: set[str] = set()
    from_start = True
    for rank, modes in now.items():
        if not modes.count:
            continue
        first = state.first[rank]
        added = set(modes.names) - set(first.names)
        # A frozen part or a teacher has statistics, or no weights that are trained.
        unmeant = modes.new_trained > 0
        if modes.whole or added or modes.count > first.count or unmeant:
            wrong[rank] = modes
            names |= added if added and not modes.whole else set(modes.names)
            from_start = from_start and modes == first
    if not wrong:
        return None
    since = min(m.step for m in wrong.values())
    return Evaluating(since, wrong, False, False, from_start, _ordered(wrong, tuple(names)))


def _ordered(held: Mapping[int, Modes], names: tuple[str, ...]) -> tuple[str, ...]:
    """In the model's order."""
    wanted, found = set(names), dict.fromkeys(n for m in held.values() for n in m.names)
    return tuple(n for n in found if n in wanted)


def _at(reported: list[Modes], step: int) -> Modes | None:
    return next((m for m in reversed(reported) if m.step <= step), None)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _severity(found: Evaluating) -> str:
    if found.disagree:
        return "warning"
    modes = list(found.by_rank.values())
    if any(m.dropout for m in modes):
        return "warning"
    if any(m.normalization for m in modes):
        meant = found.from_start or not any(m.whole for m in modes)
        return "info" if meant and not any(m.new for m in modes) else "warning"
    # A whole model that has trained in training mode before does not evaluate on purpose.
    return "warning" if not found.from_start and any(m.whole for m in modes) else "info"


def _finding(episode: Episode[Evaluating], window: Window) -> Finding:
    found, step = episode.facts, episode.first_step
    suspects = tuple(sorted(found.by_rank))
    most = max(found.by_rank.values(), key=lambda m: (m.whole, m.count))
    what = f"{count(len(found.names), 'module')} ({listing(found.names, most=_MOST_NAMES)})"
    since = "from the first step on" if found.from_start else f"since step {step}"
    effect = (
        "In evaluation mode dropout is off, and batch norm uses its running statistics and no "
        "longer updates them"
    )
    if most.new:
        effect += (
            f"; those of {count(most.new, 'module')} are as they were made (mean 0, variance 1), "
            "so that nothing is normalized"
        )
    if found.disagree:
        title, cause = _of_ranks(found, suspects, what, since, effect)
    elif most.whole:
        some = len(suspects) < len(window.ranks)
        who, verb = ranks(suspects), agree(len(suspects), "trains")
        title = f"{who.capitalize()} {verb}" if some else "The model trains"
        title += f" in evaluation mode {since}"
        cause = (
            f"The optimizer steps while the model is in evaluation mode"
            f"{f' on {who}' if some else ''}, {since}: "
            f"{most.count} of {most.of} mode-dependent modules "
            f"({listing(found.names, most=_MOST_NAMES)}). {effect}."
        )
    else:
        title = f"{count(len(found.names), 'module')} evaluate while the model trains, {since}"
        if len(found.names) == 1:
            title = f"{found.names[0]} evaluates while the model trains, {since}"
        changed = (
            f"{what} changed to evaluation mode at step {step} and did not change back, "
            if not found.from_start
            else f"{what} {agree(len(found.names), 'is')} in evaluation mode from the first step "
            "on, with weights that are trained, "
        )
        cause = f"{changed}while the rest of the model trains. {effect}."
    return episode.finding(
        kind=_KIND,
        severity=_severity(found),
        title=title[:119],
        ranks=suspects,
        cause=cause,
        remedy=(
            "Call `model.train()` after each evaluation and before the next step"
            f"{if_several(len(window.ranks), 'on every rank', before=', ')}. "
            "If these modules are meant to be frozen, freeze them before the first step, or "
            "silence this kind."
        ),
        evidence={
            "modules": list(found.names[:50]),
            "in_evaluation": most.count,
            "of": most.of,
            "whole_model": most.whole,
            "by_rank": {str(r): m.count for r, m in sorted(found.by_rank.items())},
        },
    )


def _of_ranks(
    found: Evaluating, suspects: tuple[int, ...], what: str, since: str, effect: str
) -> tuple[str, str]:
    who = ranks(suspects)
    if found.undecided:
        title = f"{who.capitalize()} train in different modes {since}"
        reported = "; ".join(
            f"rank {r} has {m.count} of {m.of} mode-dependent modules in evaluation mode"
            for r, m in sorted(found.by_rank.items())[:4]
        )
        cause = (
            f"The ranks differ in the mode of {what}: {reported}. {effect}, so the ranks do not "
            "compute gradients of the same function. Nothing shows which mode is meant."
        )
        return title, cause
    one = len(suspects) == 1
    counts = {m.count for m in found.by_rank.values()}
    if all(m.count for m in found.by_rank.values()):
        title = f"{who.capitalize()} {'trains' if one else 'train'} in evaluation mode {since}"
        cause = (
            f"{what} {agree(len(found.names), 'is')} in evaluation mode on {who} and "
            f"not on the other ranks. {effect}, so {who} {'does' if one else 'do'} not compute "
            "gradients of the function that the others train."
        )
    else:
        title = f"{who.capitalize()} {'differs' if one else 'differ'} in mode {since}"
        cause = (
            f"{what} {agree(len(found.names), 'is')} in evaluation mode on the other "
            f"ranks; on {who} {listing([str(c) for c in sorted(counts)])} mode-dependent modules "
            f"are. {effect}, so the ranks do not compute gradients of the same function."
        )
    return title, cause


def _check(state: ModeState) -> Check:
    if not state.samples:
        if state.reported:
            return Check.not_applicable("No module behaves differently in evaluation mode.")
        return Check.missing("No rank reports the mode of its modules.")
    compared = " and compared between the ranks" if state.compared else ""
    return Check.ok(
        f"The mode of the modules was checked at {count(state.samples, 'step')}{compared}."
    )
