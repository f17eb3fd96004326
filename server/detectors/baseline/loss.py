"""A loss that is worse than that of earlier runs of the project had been at the same steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.comparison.measures import Measured
from rankscope.server.detectors.base import TO_THE_END, Detector, Outcome, Reach
from rankscope.server.detectors.baseline.curves import Curve, Interim, Interims, usable
from rankscope.server.detectors.baseline.loss_findings import DATA, GIVEN, Worse, finding, others
from rankscope.server.detectors.baseline.measured import EVALUATION, LOSS, measured
from rankscope.server.detectors.baseline.texts import compared_with
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.mechanisms.episode import Watch
from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.policy import Count, Policy, Share
from rankscope.server.window import Baselines, Check, Window

_MEASURES = (LOSS, EVALUATION)

# What is wrong in a training by itself shows in its loss, norms, times and memory, too.
ROOTS = (
    *("desync.", "reduction.", "update.", "schedule.", "data.", "weights.", "loss."),
    *("buffers.", "accuracy.", "gradient.", "layer.", "clipping.", "amp.", "lr."),
    *("compression.", "batch.", "mode.", "push.", "rng.", "checkpoint.", "rank."),
)


@dataclass(frozen=True, slots=True)
class LossPolicy(Policy):
    """Thresholds of `baseline.loss`.

    Attributes:
        least: baselines without which nothing is compared: of two, nothing says which of them is
            usual.
        tolerance: share of the loss by which a run may be worse than expected at the last step
            that the baselines have, that of `rankscope gate --against`.
        early_tolerance: the same before: of half a training one does not know yet what will
            remain of a few per cent.
        confidence: of the band at the last step. One run in a hundred may be beyond it, as of the
            gate, by the loss or by that of evaluations: a half of it each.
        early_confidence: of the band before. A run is compared some 40 times, of which several in a
            row are needed, and those that follow each other agree mostly: as ten independent ones,
            by either loss, it comes to one run in a hundred again.
    """

    least: Count = 3
    tolerance: Share = 0.02
    early_tolerance: Share = 0.05
    confidence: Share = 0.995
    early_confidence: Share = 0.9995


@dataclass(slots=True)
class LossState:
    """What is remembered.

    Attributes:
        curves: of the run, by series.
        since: by measure, first step of the values and step of the first comparison that found it
            one after the other.
        judged: comparisons at which both sides had enough.
        newest: what the last of them came to.
        last: its step.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    interims: Interims = field(default_factory=Interims)
    since: dict[str, tuple[int, int]] = field(default_factory=dict)
    judged: int = 0
    newest: Measured | None = None
    last: int = -1
    watch: Watch[Worse] = field(default_factory=lambda: Watch(clear_after=0))


class BaselineLoss(Detector[LossState]):
    """The loss is worse than that of earlier runs of the project was at the same steps.

    The server keeps the runs that passed as baselines of their project, and those that somebody
    marks (`rankscope baseline`). A run is held against those of the same model (number of
    parameters) that began before it and whose settings are nearest to its own, while it goes on.
    What seeds do to a loss is in the band of the baselines; what remains is the data, the code, or
    a setting, and the settings that differ are named.

    Statistic:
        That of `rankscope gate --against`, in interim comparisons, each after a ninth more steps:
        the mean loss of the last tenth of the steps (a fifth or two fifths where that is too short
        or too noisy), and of `eval/loss` the last evaluations at the same steps, against the
        prediction limit of Student's t for one more run beside the baselines, on the logarithm. A
        part of the spread between seeds is assumed, which loses its weight as baselines are added.
        Reported where one of both is beyond the limit of 99.95 % and 5 % worse in comparisons one
        after the other, the last of which has no step in common with the first; or, at the last
        step that the baselines have, beyond the limit of 99.5 % and 2 % worse, also without the
        highest value. Over with a comparison that is within the last two limits.

    Severity:
        Warning. Information where the run has another learning rate, batch, number of ranks or
        other setting than its baselines, and those of the model (three at least) do not all agree
        on it: who tries out settings knows that some are worse.

    Evidence:
        `metric`; `step`: of the last comparison; `from_step`: of its mean; `value`, `expected`,
        `limit`; `share`: by how much it is above what was expected; `baselines`: each one's value;
        `differing`: settings that differ, own and of the nearest baseline.

    Source:
        Prediction limits of a normal sample; the spread is a scaled inverse chi squared prior with
        the sample (Smyth 2004), errors of means with dependence by Geyer (1992). How often other
        seeds of eight small trainings are found, and worse ones: `tests/lab/seeds/live.py`.
    """

    kinds = ("baseline.loss",)
    of_one_task = True
    needs = (LOSS,)
    wants = (*_MEASURES, *GIVEN, *DATA)
    effects = (
        Rule(
            root=ROOTS,
            consequence=("baseline.loss",),
            earliest=-EPISODE,
            same_ranks=False,
            why="a training in which that is wrong learns worse than those in which it was not",
        ),
    )

    policy: LossPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """What is worse at the end stays so."""
        return (Reach((LOSS,), 8, TO_THE_END),)

    def advance(self, window: Window, state: LossState) -> Outcome:
        """Takes the steps, and compares where that is due."""
        kind = self.kinds[0]
        baselines = usable(window.baselines, self.policy.least)
        if isinstance(baselines, Check):
            return Outcome({kind: baselines})
        for name, kept in baselines.curves.items():
            if name in self.wants:
                curve = state.curves.setdefault(name, Curve())
                curve.push(*mean_over_ranks(window, name), kept)
        for interim in state.interims.until(window.last_step, baselines.last):
            self._interim(interim, baselines, state)
        findings = [finding(e, baselines) for e in state.watch.take(window.last_step)]
        return Outcome({kind: self._check(baselines, state)}, tuple(findings))

    def _interim(self, interim: Interim, baselines: Baselines, state: LossState) -> None:
        """Compares what there is of both measures."""
        policy = self.policy
        beyond: list[Measured] = []
        failed = seen = False
        for metric in _MEASURES:
            if metric not in state.curves:
                continue
            last = measured(
                metric,
                interim,
                state.curves[metric],
                baselines,
                tolerance=policy.tolerance,
                confidence=policy.confidence,
            )
            if last is None:
                continue
            seen = True
            if metric == LOSS:
                state.newest, state.last = last, interim.step
            if last.state != "failed":
                state.since.pop(metric, None)
                continue
            failed = True
            if self._lasts(metric, interim, last, baselines, state):
                beyond.append(last)
        state.judged += seen
        if beyond:
            first = min(state.since[one.name][0] for one in beyond)
            given = others(GIVEN, interim, baselines, state.curves)
            data = others(DATA, interim, baselines, state.curves)
            facts = Worse(interim, tuple(beyond), given, data)
            state.watch.bad(interim.step, facts, first_step=first).facts = facts
        elif seen and not (failed and state.watch.open(interim.step) is not None):
            # What is open stays so while it is beyond the limits of the end.
            state.watch.good(interim.step)

    def _lasts(
        self, metric: str, interim: Interim, last: Measured, baselines: Baselines, state: LossState
    ) -> bool:
        """Whether what is beyond the limits of the end is so for long enough, or by enough.

        Args:
            last: what that came to.
        """
        policy = self.policy
        found = measured(
            metric,
            interim,
            state.curves[metric],
            baselines,
            tolerance=policy.tolerance if interim.final else policy.early_tolerance,
            confidence=policy.confidence if interim.final else policy.early_confidence,
            spared=interim.final,
        )
        is_open = state.watch.open(interim.step) is not None
        if found is None or found.state != "failed":
            if not is_open:
                state.since.pop(metric, None)
            return False
        begin = (last.steps or (interim.step, 0))[0]
        # Where the first comparison finds it, nothing shows that it was ever otherwise.
        onset = begin if state.judged else state.curves[metric].first
        first = state.since.setdefault(metric, (onset, interim.step))
        return interim.final or is_open or begin > first[1]

    def _check(self, baselines: Baselines, state: LossState) -> Check:
        newest = state.newest
        if newest is None:
            return Check.insufficient("Too few losses are recorded so far to be compared.")
        beyond = " The baselines go no further." if state.interims.over else ""
        return Check.ok(
            f"Compared {count(state.judged, 'time')} with {compared_with(baselines.runs)}: up to "
            f"step {state.last:,} the loss is {number(newest.value)}, where "
            f"{number(newest.expected)} is expected and {number(newest.bound)} is the limit."
            f"{beyond}"
        )
