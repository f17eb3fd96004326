"""A loss that has not moved since the start, or fell without anything learned of the inputs."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Outcome, Reach
from rankscope.server.detectors.loss.chance import Chance
from rankscope.server.detectors.loss.plateau_findings import (
    Flat,
    explained_now,
    finding_of,
)
from rankscope.server.detectors.loss.plateau_policy import PlateauPolicy
from rankscope.server.detectors.loss.plateau_short import answers_nothing
from rankscope.server.detectors.loss.standing_terms import StandingTerms
from rankscope.server.detectors.mechanisms.episode import Watch
from rankscope.server.detectors.mechanisms.epochs_seen import Visits
from rankscope.server.detectors.mechanisms.path import Path
from rankscope.server.detectors.mechanisms.series_by_step import median, noise_of_mean, together
from rankscope.server.detectors.mechanisms.statistics import BLOCK, mann_kendall, robust_sigma
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.detectors.profiles import TURNS
from rankscope.server.window import Check, Window

# Standard deviations that none of the thousands of blocks of a run exceeds by chance.
_BY_CHANCE = 4.0
# Blocks of ten losses that are remembered: what is older says nothing of a plateau of now.
_MOST_BLOCKS = 8192
# Losses from one sample to the next.
_STRIDE = 10
# Of the samples of a batch: of the inputs, and of the directions of the outputs.
_SPREADS = ("input_spread", "output_spread")


@dataclass(slots=True)
class PlateauState:
    """What `loss.plateau` remembers.

    Attributes:
        total: losses that are judged; `passed` counts those of a rate far below its peak, too, of
            which `decayed` are the newest.
    """

    last: deque[float]
    accuracies: deque[float]
    decayed: deque[float] = field(default_factory=lambda: deque(maxlen=_STRIDE))
    total: int = 0
    passed: int = 0
    first: list[float] = field(default_factory=list)
    start_step: int = 0
    first_accuracies: list[float] = field(default_factory=list)
    updates: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    first_norms: list[float] = field(default_factory=list)
    rate: float = math.nan
    peak: float = 0.0
    signed: bool = False
    moved: bool = False
    flat: bool = False
    turns: bool = False
    first_update: float = 0.0
    first_updates: int = 0
    shares: deque[tuple[int, float]] = field(default_factory=deque)  # with the count of losses
    scales: list[float] = field(default_factory=list)
    inputs: deque[float] = field(default_factory=lambda: deque(maxlen=BLOCK))
    spreads: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=BLOCK) for name in _SPREADS}
    )
    first_inputs: list[float] = field(default_factory=list)
    known: list[tuple[int, float]] = field(default_factory=list)
    block: list[tuple[int, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # means of blocks
    path: Path = field(default_factory=Path)
    unclear: bool = False  # the losses scatter too much to show whether they have moved
    visits: Visits = field(default_factory=Visits)
    terms: StandingTerms = field(default_factory=StandingTerms)
    chance: Chance = field(default_factory=Chance)
    watch: Watch[Flat] = field(default_factory=Watch)


class LossPlateau(Detector[PlateauState]):
    """Nothing is learned: the loss is where it began, or where a constant answer has it.

    Statistic:
        After 200 steps, examined every 10, of those with a learning rate of at least a tenth of its
        peak: the mean of the last 100 losses lies less than 5 % below that of the first 50. Once it
        has fallen by more, this kind has nothing more to say. A training that was resumed, or that
        has nothing left to learn, looks the same; so it is reported only if the accuracy is 0.6 or
        less and has not risen (by 3 standard errors, and 0.05), or, where there is no accuracy, if
        the updates say more.

        Or, wherever the loss began: over the last 100 losses, which do not fall (Mann-Kendall Z of
        ten medians of ten above -2.5; of losses that scatter so much that a fall of 5 % would not
        show, also in those of the second half of the run), the share of the deviance that the
        answers explain is 0.01 or less (or no more than 3 standard errors, 0.05 at most, for which
        up to half of the run is taken). Where it is below 0 by 3 standard errors, a Z above -0.5 is
        needed, and one above -2.5 over the last two thirds of the run: a training that has not come
        so far yet is likely on its way. The answers are then no better than the frequencies of the
        classes, or the mean of the targets: whatever the inputs say is not used. Not where
        optimizers step in turns, as the players of a game do: there the best answer may be a
        constant. From 120 steps on, where the losses of the run's second half do not fall at all (Z
        above -0.5), the share in these is 0.01 or less by a standard error, and not larger by one
        than in the quarter before. Or the loss does not fall, less than 0.65 of the deviance is
        explained, the first updates were as large as a tenth of the parameters, and those of now
        are above 1e-2 of them. Or the share is below -0.5 by 3 standard errors, whether the loss
        falls or not: after 200 steps the answers are still worse than one that is always the same,
        as with targets that are not scaled.

    Severity:
        Info before 200 steps: jobs that try something out have targets at random; and while all
        steps together come to less than 0.3 of the parameters, where the loss has fallen to what
        frequencies give: these are learned first (until 1,000 losses, or where updates are below
        1e-5). Then a warning where the accuracy is low, or the answers explain nothing of the
        deviance however high it is, updates are below 1e-5 of the parameters, the share of the
        deviance says so, or the gradient has shrunk to less than a tenth of the first ten norms;
        info once the model explains more than 0.05 (by 3 standard errors) or, where that is not
        known, its accuracy has risen, of data of which it has seen each sample up to 4 times, and
        nothing but the plateau was wrong; info where none of them is posted and the updates are of
        usual size (a warning after 250 losses that have gained 2 % at most, by steps that come to
        half of the parameters, of one optimizer), and where the loss alone is that of guessing.
        Info for answers worse than a constant one that lose a third of what they are above it in
        the second half of the run, unless inputs are large (`input_rms` above 30) or targets are
        far larger than the outputs.
        Losses that change their sign are surrogates and are not judged.
        Parts of the loss that a user logs (by their names: `cls_loss`, `recon`, `mse` ...) are
        reported where all 50 of 200 observations or more lie within 5 % of the first 10, while the
        loss has come to half of what it was: a warning at an accuracy of 0.6 or less, else info.

    Evidence:
        `first`, `last` (means of the loss), `gain`, `standard_error` (of `last`), and where they
        are posted `accuracy`, `explained_deviance`, `output_scale` (of the first steps),
        `update_ratio`, `grad_norm`, `lr`; `grad_norm_first` where the gradient has shrunk to
        less than a tenth of it.

    Source:
        runmedic's and SageMaker's rules on losses that do not fall, with the evidence that
        distinguishes "has not begun" from "is done". SageMaker's fires on 60 of 64 healthy runs.
        McFadden's pseudo R^2 (1974): 1 - loss / loss of the best constant answer.
    """

    kinds = ("loss.plateau",)
    of_one_task = True
    needs = ("loss",)
    wants = (
        "accuracy",
        "lr",
        "update_ratio",
        "grad_norm",
        "explained_deviance",
        "output_scale",
        "target_share",
        "input_rms",
        *_SPREADS,
        "*",
    )

    policy: PlateauPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Losses that can change."""
        return (Reach(self.needs, self.policy.evidence, TO_THE_END, moves="at all"),)

    def start(self) -> PlateauState:
        """Nothing seen yet."""
        last = self.policy.last
        state = PlateauState(deque(maxlen=last), deque(maxlen=last))
        state.shares = deque(maxlen=last)
        # As many losses as it is judged by show whether it is over because the model learns.
        state.watch.clear_after = last
        return state

    def advance(self, window: Window, state: PlateauState) -> Outcome:
        """Takes the losses one by one."""
        state.turns |= any(event.kind == TURNS for event in window.events)
        state.visits.lay(window)
        state.chance.take(window)
        for step, row in together(window, *self.needs, *self.wants):
            self._remember(step, row, state)
            state.visits.pass_to(step)
            loss = row.get("loss", math.nan)
            if not math.isfinite(loss):
                continue
            state.passed += 1
            if math.isfinite(state.rate) and state.rate < self.policy.rate * state.peak:
                # Such steps teach nothing, but are as many in which nothing was learned.
                state.decayed.append(loss)
                if len(state.last) == self.policy.last and not state.signed:
                    self._after_decay(step, state)
                continue
            state.signed |= loss < 0
            state.total += 1
            if len(state.first) < self.policy.first:
                state.first.append(loss)
                state.start_step = step if state.total == 1 else state.start_step
            state.last.append(loss)
            if state.total % BLOCK == 0:
                state.losses.append(float(np.mean(list(state.last)[-BLOCK:])))
                del state.losses[:-_MOST_BLOCKS]
            self._share(step, explained_now(row), state)
            if state.total >= self.policy.soon and state.total % _STRIDE == 0 and not state.signed:
                self._judge(step, state)
        state.visits.pass_to(window.last_step)
        findings = tuple(finding_of(e, self.policy) for e in state.watch.take(window.last_step))
        state.terms.take(window)
        if not state.turns:
            findings += tuple(state.terms.findings(window.last_step))
        return Outcome({"loss.plateau": _check(state, self.policy)}, findings)

    def _after_decay(self, step: int, state: PlateauState) -> None:
        """Judges the losses before the rate decayed, where those since are no better.

        Once, and of answers of known worth: of losses that fell within the first steps, they alone
        say nothing.
        """
        if np.mean(state.decayed) <= (1 - self.policy.min_gain) * np.mean(state.last):
            state.watch.good(step)
        elif state.passed == self.policy.evidence:
            if len(self._recent_shares(state)) >= self.policy.shares:
                self._judge(step, state)

    def _remember(self, step: int, row: dict[str, float], state: PlateauState) -> None:
        if "lr" in row:
            state.rate = row["lr"]
            state.peak = max(state.peak, state.rate)
        if math.isfinite(row.get("accuracy", math.nan)):
            state.accuracies.append(row["accuracy"])
            if len(state.first_accuracies) < self.policy.first:
                state.first_accuracies.append(row["accuracy"])
        if math.isfinite(row.get("update_ratio", math.nan)):
            state.updates.append(row["update_ratio"])
            state.path.push(step, row["update_ratio"])
            if state.first_updates < BLOCK:
                state.first_updates += 1
                state.first_update = max(state.first_update, row["update_ratio"])
        if math.isfinite(row.get("grad_norm", math.nan)):
            state.norms.append(row["grad_norm"])
            if len(state.first_norms) < BLOCK:
                state.first_norms.append(row["grad_norm"])
        if math.isfinite(row.get("output_scale", math.nan)) and len(state.scales) < BLOCK:
            state.scales.append(row["output_scale"])
        for name in _SPREADS:
            if math.isfinite(row.get(name, math.nan)):
                state.spreads[name].append(row[name])
        if math.isfinite(row.get("input_rms", math.nan)):
            state.inputs.append(row["input_rms"])
            if len(state.first_inputs) < BLOCK:
                state.first_inputs.append(row["input_rms"])

    def _share(self, step: int, share: float, state: PlateauState) -> None:
        """Takes the share of the deviance explained, NaN where it was not posted."""
        if math.isfinite(share):
            state.shares.append((state.total, share))
            state.block.append((step, share))
        if len(state.block) == BLOCK:
            mean = float(np.mean([value for _, value in state.block]))
            state.known.append((state.block[0][0], mean))
            del state.known[:-_MOST_BLOCKS]
            state.block.clear()

    def _recent_shares(self, state: PlateauState) -> list[float]:
        """The shares of the last losses; where few of these were sampled, the newest ones.

        They are as many as are needed, and of the second half of the run.
        """
        policy, total = self.policy, state.total
        recent = [share for at, share in state.shares if at > total - policy.last]
        if len(recent) >= policy.shares:
            return recent
        return [share for at, share in state.shares if 2 * at > total][-policy.shares :]

    def _judge(self, step: int, state: PlateauState) -> None:
        policy = self.policy
        first, last = float(np.mean(state.first)), float(np.mean(state.last))
        state.flat = first - last <= policy.min_gain * abs(first)
        # Once it has fallen it may rise again, which is no matter of this kind.
        state.moved |= not state.flat and state.passed >= policy.evidence
        shares = self._recent_shares(state)
        explained = float(np.mean(shares)) if len(shares) >= policy.shares else math.nan
        if not state.path.fresh(step, policy.evidence):
            state.updates.clear()
        least = explained - policy.gain_error * noise_of_mean(shares)
        nothing = rash = worse = False
        if state.passed >= policy.evidence:
            nothing, rash = self._constant(shares, state), self._rash(explained, state)
            worse = self._worse(shares, state)
        elif not state.turns and answers_nothing(state.last, state.shares, state.total, policy):
            nothing = True
        else:
            state.watch.good(step)
            return
        accuracy = float(np.mean(state.accuracies)) if state.accuracies else math.nan
        guessed = self._guessed(last, state)
        if not (nothing or rash or worse or guessed):
            known = not least <= policy.explained
            if state.moved or (known and self._learned(accuracy, state)):
                self._begun(explained, shares, accuracy, state)
                state.watch.good(step)
                return
            state.unclear = self._unclear(first, state)
            if state.unclear:
                return
            if math.isnan(accuracy) and not state.updates:
                return  # Nothing shows whether it has not begun or is done.
        facts = Flat(
            first,
            last,
            noise_of_mean(state.last),
            accuracy,
            median(state.updates),
            median(state.norms),
            median(state.first_norms),
            state.rate,
            explained,
            least=least,
            nothing=nothing,
            rash=rash and not nothing,
            worse=worse,
            scale=median(state.scales),
            inputs=median(state.inputs),
            inputs_first=median(state.first_inputs),
            inputs_spread=median(state.spreads["input_spread"]),
            outputs_spread=median(state.spreads["output_spread"]),
            nears=worse and self._nears(state),
            guessed=guessed,
            short=state.passed < policy.evidence,
            path=state.path.length if state.updates else math.nan,
            steps=state.passed,
            turns=state.turns,
            resumed=state.start_step > 0,
        )
        # What is rash was wrong from the start, whatever the first steps seemed to learn.
        if not facts.rash:
            self._date(facts, state)
        since = facts.lost_at if facts.lost_at >= 0 else state.start_step
        state.watch.bad(step, facts, first_step=since).facts = facts

    def _guessed(self, last: float, state: PlateauState) -> int:
        """Among how many answers the model may as well guess; 0 where its loss is another one."""
        policy = self.policy
        answers = state.chance.among(last, policy.guessed)
        if not answers or state.turns or state.known or state.accuracies:
            return 0
        least = (1 - policy.guessed) * math.log(answers)
        still = median(state.first) - last <= policy.min_gain * last
        return answers if still and min(state.losses) > least and not self._falls(state) else 0

    def _learned(self, accuracy: float, state: PlateauState) -> bool:
        if not math.isfinite(accuracy):
            return False
        policy = self.policy
        began = float(np.mean(state.first_accuracies))
        error = math.hypot(noise_of_mean(state.accuracies), noise_of_mean(state.first_accuracies))
        gained = accuracy - began > max(policy.gain_error * error, policy.accuracy_gain)
        return accuracy > policy.learned or gained

    def _begun(
        self, explained: float, shares: list[float], accuracy: float, state: PlateauState
    ) -> None:
        """Notes of a plateau that is over whether it is because the model has begun to learn."""
        episode, policy = state.watch.current, self.policy
        if episode is None or not state.visits.mean <= policy.visits:
            return
        if math.isfinite(explained):
            error = policy.gain_error * noise_of_mean(shares)
            learns = explained - error > policy.most_explained
        else:
            # Less sure: an accuracy rises to the share of the commonest class whatever is learned.
            learns = self._learned(accuracy, state)
        episode.facts.overcome |= learns

    def _unclear(self, first: float, state: PlateauState) -> bool:
        """Whether the losses scatter too much to show that they have not moved."""
        policy = self.policy
        error = math.hypot(noise_of_mean(state.first), noise_of_mean(state.last))
        return policy.gain_error * error > 2 * policy.min_gain * abs(first)

    def _arrives(self, state: PlateauState) -> bool:
        """Whether the losses may still be on their way to those of a constant answer.

        A fall that slows down shows in the last two thirds of the run, where the last hundred
        losses are too few.
        """
        if self._falls(state, self.policy.arriving):
            return True
        longer = state.losses[len(state.losses) // 3 :]
        if len(longer) < BLOCK:
            return False
        pieces = [float(np.mean(piece)) for piece in np.array_split(longer, BLOCK)]
        return mann_kendall(pieces) < -self.policy.falling

    def _falls(self, state: PlateauState, sigmas: float | None = None) -> bool:
        """Whether the last losses still fall, by a Mann-Kendall Z below -`sigmas`.

        Where the last 100 scatter so much that they cannot show the fall of `min_gain`, as of
        batches of one sample, those of the second half of the run count as well.
        """
        sigmas = self.policy.falling if sigmas is None else sigmas
        losses = list(state.last)
        pieces = [losses[at : at + BLOCK] for at in range(0, len(losses), BLOCK)]
        if mann_kendall([median(piece) for piece in pieces]) < -sigmas:
            return True
        error = self.policy.gain_error * noise_of_mean(losses)
        half = state.losses[len(state.losses) // 2 :]
        if error <= self.policy.min_gain * abs(float(np.mean(losses))) or len(half) < 2 * BLOCK:
            return False
        longer = [float(np.mean(piece)) for piece in np.array_split(half, BLOCK)]
        return mann_kendall(longer) < -sigmas

    def _constant(self, shares: list[float], state: PlateauState) -> bool:
        """Whether the answers are beyond doubt no better than one that is always the same."""
        policy = self.policy
        if len(shares) < policy.shares or state.turns:
            return False
        mean, error = float(np.mean(shares)), policy.gain_error * noise_of_mean(shares)
        blocks = len(shares) // BLOCK
        while error > policy.most_explained:
            # Single samples say little: as many more as it takes, of the second half of the run.
            blocks *= 2
            if 2 * blocks > len(state.known) or not blocks:
                return False
            longer = [share for _, share in state.known[-blocks:]]
            mean, error = float(np.mean(longer)), policy.gain_error * noise_of_mean(longer)
        if mean < -error:
            return not self._arrives(state)
        return mean <= max(policy.explained, error) and not self._falls(state)

    def _worse(self, shares: list[float], state: PlateauState) -> bool:
        """Whether the answers are beyond doubt far worse than one that is always the same."""
        error = self.policy.gain_error * noise_of_mean(shares)
        known = len(shares) >= self.policy.shares and not state.turns
        return known and float(np.mean(shares)) + error < -self.policy.worse

    def _nears(self, state: PlateauState) -> bool:
        """Whether answers worse than a constant one come closer to that."""
        half, part = len(state.known) // 2, len(state.known) // 8
        if not part:
            return False
        excess = [-share for _, share in state.known[half:]]
        before, now = float(np.mean(excess[:part])), float(np.mean(excess[-part:]))
        return now < (1 - self.policy.nearing) * before

    def _rash(self, explained: float, state: PlateauState) -> bool:
        policy = self.policy
        return (
            explained < policy.poor
            and not state.turns
            and state.first_update > policy.rash_begin
            and median(state.updates) > policy.rash
            and not self._falls(state)
        )

    def _date(self, facts: Flat, state: PlateauState) -> None:
        """Since when nothing is explained, where something was before."""
        shares = [share for _, share in state.known]
        # Of small batches a block of ten is above any fixed limit by chance.
        noise = robust_sigma(np.diff(shares)) / math.sqrt(2) if len(shares) > 2 else 0.0
        limit = max(2 * self.policy.most_explained, _BY_CHANCE * noise)
        at = len(state.known)
        while at > 0 and state.known[at - 1][1] <= limit:
            at -= 1
        if at > 0 and at < len(state.known):
            facts.lost_at = state.known[at][0]
            facts.knew = max(share for _, share in state.known[:at])


def _check(state: PlateauState, policy: PlateauPolicy) -> Check:
    if state.signed:
        why = "The loss changes its sign: it is a surrogate, and need not fall."
        return Check.not_applicable(why)
    if state.moved:
        first = number(float(np.mean(state.first)))
        return Check.ok(f"The loss has fallen from {first} to {number(state.last[-1])}.")
    if state.passed < policy.evidence:
        return too_few(state.passed, "finite loss value", policy.evidence)
    if state.unclear:
        return Check.insufficient("Single losses scatter too much to show whether they have moved.")
    if state.accuracies or state.updates:
        return Check.ok("The loss has hardly moved, but what was learned before stays.")
    return Check.insufficient(
        "The loss has hardly moved. Without an accuracy and `update_ratio` nothing shows whether "
        "it has not begun to learn or has nothing left to learn."
    )
