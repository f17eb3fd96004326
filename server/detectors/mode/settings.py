"""Modules whose settings leave next to nothing of what they are for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, percent, sentences
from rankscope.server.detectors.mode.slow_statistics import (
    EVALUATIONS,
    PASSES,
    TRAINING,
    SlowStatistics,
)
from rankscope.server.window import Check, Occurrence, Window

_KIND = "mode.settings"
_EVENT = "mode.changed"
_MOST_NAMES = 5


@dataclass(slots=True)
class SettingsState:
    """What ranks have said of their modules.

    Attributes:
        dropping: name of a dropout module -> its rate.
        still: normalizations whose statistics stay what they were made.
        slow: evaluations by statistics that hardly any batch has gone into.
        first_step: of the first event that named any; -1 for none.
    """

    reported: bool = False
    dropping: dict[str, float] = field(default_factory=dict)
    still: tuple[str, ...] = ()
    first_step: int = -1
    slow: SlowStatistics = field(default_factory=SlowStatistics)


class ModeSettings(Detector[SettingsState]):
    """A dropout that leaves a tenth or less, or a batch norm that keeps no statistics, or hardly.

    A rate of 0.95 is mostly one that was meant to be kept: libraries differ in which of both they
    ask for. A momentum of 0 leaves running statistics as they were made (mean 0, variance 1), which
    evaluations then normalise by; other libraries call the complement momentum. The loss of
    training shows neither: it falls, more slowly, or as always.

    Statistic:
        None: the settings of modules in training mode, as each rank reports them at its first step
        and where the mode of a module changes. Dropout with a rate of 0.9 or more; normalizations
        with a momentum of 0 that began with statistics of no batch. And evaluations after 100
        steps or more that lose over 1.5 times as much as training did in the last 20, where the
        momentum m of a normalization leaves (1 - m) to the number of batches, the weight of the
        statistics that it was made with, above a half.

    Severity:
        Warning.

    Evidence:
        `dropping` (rate by module), `still` (names); `share` and `slow` (momentum by module).

    Source:
        TensorFlow 1 and `keep_prob`; Keras' `momentum` of 0.99, which is PyTorch's 0.01.
    """

    kinds = (_KIND,)
    wants = (EVALUATIONS, TRAINING, PASSES)
    lasting = "settings stay as they are until something sets them"
    effects = (
        Rule(
            root=(_KIND,),
            consequence=("loss.plateau", "accuracy.stalled", "generalization.gap", "batch.noise"),
            earliest=-EPISODE,
            same_ranks=False,
            why="what the module leaves is little to learn from, or to evaluate by",
        ),
    )

    def advance(self, window: Window, state: SettingsState) -> Outcome:
        """Takes what ranks report of their modules."""
        slow: dict[int, dict[int, dict[str, float]]] = {}
        for event in sorted(window.events, key=lambda e: (e.step, e.rank)):
            if event.kind == _EVENT:
                _take(event, state)
                momenta = {str(name): m for name, m in _pairs(event.data.get("slow"))}
                slow.setdefault(event.step, {})[event.rank] = momenta
        state.slow.take(window, slow)
        findings = state.slow.findings(window)
        if state.first_step >= 0:
            findings.append(_finding(state, window.last_step))
        return Outcome({_KIND: _check(state)}, tuple(findings))


def _take(event: Occurrence, state: SettingsState) -> None:
    state.reported = True
    dropping, still = event.data.get("dropping"), event.data.get("still")
    state.dropping |= {str(name): rate for name, rate in _pairs(dropping)}
    if isinstance(still, list | tuple):
        state.still = tuple(dict.fromkeys((*state.still, *map(str, still))))
    if state.first_step < 0 and (state.dropping or state.still):
        state.first_step = event.step


def _pairs(reported: Any) -> list[tuple[str, float]]:
    if not isinstance(reported, list | tuple):
        return []
    pairs = [one for one in reported if isinstance(one, list | tuple) and len(one) == 2]
    return [(name, float(rate)) for name, rate in pairs if isinstance(rate, int | float)]


def _check(state: SettingsState) -> Check:
    if not state.reported:
        return Check.missing("No rank reports the mode of its modules.")
    return Check.ok("No dropout has a rate of 0.9 or more, and no batch norm stands still.")


def _finding(state: SettingsState, last_step: int) -> Finding:
    names = list(state.dropping)
    cause = remedy = title = ""
    if names:
        rate = percent(max(state.dropping.values()))
        what = f"`{names[0]}`" if len(names) == 1 else count(len(names), "dropout module")
        share = rate if len(names) == 1 else f"up to {rate}"
        title = f"{what} {agree(len(names), 'drops')} {share} of the units"
        cause = (
            f"In training {listing([f'`{n}`' for n in names], most=_MOST_NAMES)} "
            f"{agree(len(names), 'sets')} {share} of the numbers to 0 at every step, and the rest "
            "is multiplied accordingly: what is left is mostly noise."
        )
        remedy = "`p` is the share that is dropped, not the one that is kept; 0.1 to 0.5 is usual. "
    if state.still:
        who = listing([f"`{name}`" for name in state.still], most=_MOST_NAMES)
        title = title or (
            f"{count(len(state.still), 'normalization')} {agree(len(state.still), 'keeps')} the "
            f"statistics {'it was' if len(state.still) == 1 else 'they were'} made with"
        )
        still = (
            f"The momentum of {who} is 0, and the running statistics are of no batch (mean 0, "
            "variance 1): training normalises by each batch, evaluations by these."
        )
        cause = sentences(cause, still)
        remedy += (
            "PyTorch's momentum is the weight of the new batch: 0.1 is usual (Keras' 0.9), and "
            "None takes the mean over all."
        )
    return Finding(
        kind=_KIND,
        severity="warning",
        title=title[:119],
        seen_step=state.first_step,
        last_step=last_step,
        first_step=state.first_step,
        cause=cause,
        remedy=remedy.strip(),
        clear_after=None,
        evidence={"dropping": dict(state.dropping), "still": list(state.still)},
    )
