"""A reduced gradient on which all ranks agree, and that is not the mean of what went in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope.server.comparison.conservation import COUNTS
from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Outcome, Reach
from rankscope.server.detectors.mechanisms.loss_weights import INPUTS
from rankscope.server.detectors.mechanisms.reduction_series import value_of
from rankscope.server.detectors.policy import Observations, Policy, Share, Times
from rankscope.server.detectors.reduction.checks import check_of
from rankscope.server.detectors.reduction.explain import Divisor, Fault, finding_of
from rankscope.server.detectors.reduction.factors import (
    counts_of,
    divisor_of,
    is_by_ranks,
    is_loss_scale,
    is_near,
    is_right_elsewhere,
    meaning_of,
)
from rankscope.server.detectors.reduction.state import Divided, ReductionState, Streak
from rankscope.server.detectors.reduction.unreduced import SERIES as LEFT
from rankscope.server.window import Float64, Misreduced, Reduction, Window

_SPECIFIC = frozenset(("nothing", "stale", "swapped", "ranks"))


@dataclass(frozen=True, slots=True)
class ReductionPolicy(Policy):
    """Thresholds of `reduction.wrong`.

    Attributes:
        exact: relative difference up to which a factor counts as a number of ranks.
        held: consecutive samples after which something unexplained is a change, or one factor or
            set of weights is lasting.
        turned_after: samples with the mean itself after which one whose sign is turned, or that is
            `sudden` times as large, is reported at once: no clipping does that.
        sudden: factor of those.
        gross: error of a rank's weight from which on it is reported at once; a smaller one has to
            be `held`.
    """

    exact: Share = 1e-3
    held: Observations = 3
    gross: Share = 0.1
    turned_after: Observations = 8
    sudden: Times = 10.0


class ReductionWrong(Detector[ReductionState]):
    """The reduced gradient is not the mean of the ranks' own gradients, although all agree on it.

    A missing or a second division, ranks that count twice, too little or not at all, tensors that
    were exchanged for each other, a result of a step before: every rank then takes the same wrong
    step, and no comparison of weights can see it.

    Statistic:
        Sketches are linear: the sketch of what came out is the sum of the sketches of what went in,
        each times its rank's weight, to 1e-4 of its size (3e-2 for tensors of 16 bits). Least
        squares over all tensors gives the weights and their standard errors (1e-8 in float32, 1e-3
        in bfloat16), with clipping and loss scale taken out where these are posted. Right are 1/N,
        and the ranks' shares of the `tokens` or `samples` of the step. A rank whose weight is
        another by more than 0.5 % and 7 standard errors is named with what it counts, at once where
        that is 10 % too much or too little, else at the third sample in a row. One factor for all
        ranks that is the number of ranks, or one over it, is reported at once (the second time, if
        gradients were scaled by hand before); any other at the third sample in a row (one of 10 and
        more, or below 0, at once, where 8 before were the mean itself), unless it is one over the
        micro-batches of a step on all stages of the job alike, or a loss scale (a power of two from
        64 on), or what the losses were divided by beforehand (of a cross entropy, of which the mean
        is known). So are weights that stay the same and are nobody's share; other weights at each
        step may be those of tokens that nobody posts. Weights times local norms that are one number
        for all ranks that count less than 1/N, at three samples in a row, are clipping before the
        reduction. Of single tensors, too, a factor as of a sum that was divided by one rank more or
        less, by the job's ranks or the micro-batches, is reported at the third sample in a row.
        Tensors without the common weights are compared with zeros, the sampled step before, the
        other tensors of their shape, and other weights. The whole is compared with the mean in
        which one rank's gradient is that of the sampled step before. Something else altogether is
        reported only where the reduction was right before: a gradient may be changed on purpose
        (clipping by value, noise, hooks). Where torch's own hooks round to 16 bits, these bits are
        allowed for (and what float16 lacks below 6e-8); of matrices that PowerSGD approximates,
        only what is not an approximation counts (zeros, a factor, a rank left out); the tensors
        that it leaves alone are held to the mean. Not judged are tensors of which rounding is left:
        elements below 1e-34 (of float32, whose smallest normal number is 1e-38), and gradients of
        the ranks that cancel each other to 1e-6. Nor is anything where the ranks do not agree on
        the result, which is `desync.gradients`. Over after 8 steps in order.

        Means of means: ranks count equally, the largest number of tokens (or samples) of a step is
        twice the smallest or more at half of all samples, 8 at least, and the local norms do not
        grow with them (exponent below 1/4 by 3 standard errors; of sums it is 1/2 at least).

        Shards: of ranks over which one replica is dealt out (FSDP), the factors of torch's clipping
        differ by 0.1 % or more at three consecutive samples; or two of them or more have one and
        the same norm there, to 1e-4, which is the largest of all, and have been seen to have others
        (in total, or of single tensors: a gradient of signs has one norm for ever).

        Averages of the parameters, as of local SGD, conserve the mean of all ranks: what the ranks
        are moved by adds up to zero, to 2 % of it. Where it does not at two averages in a row after
        three at which it did, or what moved it is the same weights from the start on (in steps of
        equal samples), the ranks that count otherwise are named by least squares. A multiple of the
        mean is recognised at three averages, and at the first one, after three in order, a rank
        that gave what all held after the one before.

        What comes out as an approximation from the start (a hook that compresses): the share of the
        mean that comes out, `<reduced, mean> / |mean|^2`, becomes N times as large, or one N-th, to
        25 %, and 8 samples in a row are beyond all of the 16 before; `grad_norm` follows by sqrt(N)
        or more (clipping that nobody posts gives the same norm). And the share of each rank's own
        gradient that comes out of it (least squares on all ranks' at every sample, the mean of 24):
        one that is -1, 0, 1/2, 2 or 3 times the others', to a fifth, by 7 standard errors, while
        these agree to 0.15.

        Under FSDP2, gradients that are kept unreduced when the optimizer steps, twice in a row
        (`gradients_unreduced`).

    Severity:
        Critical; a warning where a tensor's gradient is dropped, where what it is is not known,
        where a rank counts up to a half too much or too little, and for a factor that is not the
        number of ranks. Information for means of means, and for a factor that was there from the
        first step on and is no divisor that gets mixed up with the number of ranks (the world size,
        the micro-batches, one rank more or less).

    Evidence:
        `factor`, `ratio`, `expected_ratio`, `divisor` (a whole number by which a sum would have
        been divided), `pattern`, `odd` (what ranks count, 1 being right), `weights` of the ranks
        and `weight_errors`, `weighted_by`, `tensor_details` (name, shape, relative distance, what
        it is instead), `wrong_count`, `tensor_count`, `ranks_in_it`, `observed`, `agreed_until`
        (last sample before at which it was in order).

    Source:
        Conservation of the sum; microsoft/DeepSpeed#2343 and tensorflow/benchmarks#466 are two of
        the errors that it finds; huggingface/transformers#34191 is a mean of means.
    """

    kinds = ("reduction.wrong",)
    wants = (
        *("clip_coefficient", "amp_scale", "micro_steps", "grad_norm_local", "grad_norm"),
        *("loss", *INPUTS),
        *COUNTS,
        LEFT,
    )
    min_ranks = 2

    policy: ReductionPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive reductions that are off by a factor."""
        return (Reach(("reductions",), self.policy.held, LASTS_SAMPLED),)

    def advance(self, window: Window, state: ReductionState) -> Outcome:
        """Goes through the reductions whose both sides are known."""
        if window.reductions:
            state.losses.take(window)
        for made in window.reductions:
            state.compared += 1
            state.unequal += not made.agreed
            state.ranks = max(state.ranks, len(made.ranks))
            state.tensor_count = max(state.tensor_count, made.tensor_count)
            if not made.agreed or not made.known:
                continue
            state.tensors = max(state.tensors, made.known - made.compressed)
            state.compressed = made.compressed
            state.unknown = made.unknown
            state.counted.observe(made)
            self._judge(window, state, made)
        findings = [
            finding_of(episode)
            for watch in (state.watch, state.notes)
            for episode in watch.take(window.last_step)
        ]
        for of_samples in (state.means, state.gain, state.counted):
            findings += of_samples.findings(window)
        for part in (state.shards, state.averages, state.unreduced):
            part.take(window)
            findings += part.findings(window)
        return Outcome({"reduction.wrong": check_of(window, state)}, tuple(findings))

    # ---------------------------------------------------------------------------- one reduction

    def _judge(self, window: Window, state: ReductionState, made: Reduction) -> None:
        if made.known == made.compressed:
            return  # of an approximation alone nothing is known but how near it comes
        clip, scale = (value_of(window, made, n) for n in ("clip_coefficient", "amp_scale"))
        expected = (1.0 if clip is None else clip) / (1.0 if scale is None else scale)
        if not (math.isfinite(expected) and expected > 0) or made.pattern == "accumulated":
            return  # another detector's matter
        state.gain.observe(window, made, expected)
        fault = Fault(reduction=made, expected=expected)
        if made.pattern in ("stale", "late", "other"):
            state.streaks.pop(int(made.ranks[0]), None)
            fault.pattern = made.pattern
            if made.pattern == "late":
                fault.odd = {made.late: 0.0}
            if made.pattern != "other":
                self._found(state, fault)
            else:
                self._unexplained(state, fault)
            return
        counts = counts_of(window, made)
        if (limit := state.clipped.take(window, made)) is not None:
            fault.pattern, fault.factor = "clipped", limit.norm
            if limit.count >= self.policy.held:
                self._found(state, fault, first_step=limit.since)
            return
        said = meaning_of(made, expected, counts)
        fault.factor, fault.by = said.factor, said.by
        if said.how == "mean":
            self._mean(window, state, fault, counts)
        elif said.how == "ranks":
            fault.odd = {int(made.ranks[row]): times for row, times in said.odd.items()}
            self._odd(state, fault)
        else:
            self._own_weights(state, fault, counts)

    def _mean(
        self,
        window: Window,
        state: ReductionState,
        fault: Fault,
        counts: dict[str, Float64],
    ) -> None:
        """A mean, up to a factor, of what ranks put in."""
        made, factor, size = fault.reduction, fault.factor, len(fault.reduction.ranks)
        micro = value_of(window, made, "micro_steps") or 1.0
        usual = (
            is_near(factor, 1.0, self.policy.exact)
            or abs(factor - 1.0) <= made.ratio_error / fault.expected
        )
        # Stages of a pipeline take the mean over micro-batches alike, or all leave it to the loss.
        mine = int(made.ranks[0])
        state.factors[mine] = factor
        averaged = is_near(factor, 1.0 / micro, self.policy.exact) and all(
            is_near(factor, other, self.policy.exact)
            for key, other in state.factors.items()
            if key != mine
        )
        # A sum over 64 ranks is no loss scale.
        by_ranks = is_by_ranks(factor, size, self.policy.exact)
        scaled = is_loss_scale(factor, self.policy.exact) and not by_ranks
        # A sum of gradients of losses that were divided by the number of ranks is their mean.
        scaled |= is_near(factor * state.losses.common, 1.0, self.policy.exact)
        if not usual and is_right_elsewhere(made, factor, self.policy.exact):
            # It is not in every tensor: those that have it are wrong, though they be most of them.
            fault.most, fault.tensors = (
                True,
                tuple(
                    Misreduced(name=name, shape=(), relative=abs(factor - 1.0), how="factor")
                    for name in made.common
                ),
            )
        if not usual and not averaged and not scaled:
            streak = self._streak(state, made, (factor,))
            fault.pattern = "factor"
            fault.divisor = divisor_of(
                factor, size, window.world_size, int(micro), self.policy.exact
            )
            # Where nothing was ever scaled by hand, a factor is no coincidence.
            if by_ranks:
                if streak.count > 1 or not state.scaled:
                    self._found(state, fault, first_step=streak.since)
                return
            known_plain = state.plain >= self.policy.turned_after
            sudden = known_plain and not 0 <= factor < self.policy.sudden
            if streak.count >= self.policy.held or sudden:
                fault.changed = state.plain >= self.policy.held
                # Between dividing by the ranks once more and twice; beyond, it is the tokens of a
                # batch that a sum is divided by after the reduction.
                twice = size**-2 <= factor < 1.0 / size
                known = fault.changed or fault.divisor.known or twice
                self._found(state, fault, first_step=streak.since, note=not known)
                if known:
                    return
        else:
            state.streaks.pop(int(made.ranks[0]), None)
        wrong = [
            t
            for t in made.wrong
            if t.how in _SPECIFIC or is_by_ranks(t.factor, size, self.policy.exact)
        ]
        divided = self._divided(window, state, fault, int(micro))
        if wrong:
            fault.pattern, fault.most, fault.tensors = wrong[0].how, False, tuple(wrong)
            fault.divisor = Divisor()
            self._found(state, fault)
        elif divided is not None:
            fault.pattern, fault.most = "factor", False
            fault.tensors, fault.divisor, since = divided
            self._found(state, fault, first_step=since)
        elif any(t.how == "other" for t in made.wrong):
            fault.pattern, fault.tensors = "other", made.wrong
            self._unexplained(state, fault)
        else:
            if not fault.by:
                state.means.observe(window, made, counts)
            self._kept(state, made.step, usual=usual)

    def _odd(self, state: ReductionState, fault: Fault) -> None:
        """All ranks but some count as they should."""
        fault.pattern = "ranks"
        weights = tuple(np.array(fault.reduction.weights) / fault.expected)
        streak = self._streak(state, fault.reduction, weights)
        gross = any(abs(times - 1.0) >= self.policy.gross for times in fault.odd.values())
        if gross or streak.count >= self.policy.held:
            self._found(state, fault, first_step=None if gross else streak.since)

    def _own_weights(self, state: ReductionState, fault: Fault, counts: dict[str, Float64]) -> None:
        """Weights that are neither the same nor those of any counts that are known.

        Tokens that nobody logs make such weights, others at each step.
        """
        made = fault.reduction
        weights = np.array(made.weights) / fault.expected
        streak = self._streak(state, made, tuple(weights))
        fixed = streak.count >= self.policy.held and bool(counts)
        if fixed:
            fault.pattern = "weights"
            fault.odd = dict(zip(made.ranks.tolist(), (weights * len(weights)), strict=True))
            self._found(state, fault, first_step=streak.since)
        else:
            self._kept(state, made.step, usual=False)

    def _divided(
        self, window: Window, state: ReductionState, fault: Fault, micro: int
    ) -> tuple[tuple[Misreduced, ...], Divisor, int] | None:
        """Tensors that stay divided by a number mixed up with that of the ranks, and since when.

        Other factors of single tensors are mostly meant (multipliers of layers).
        """
        made = fault.reduction
        size, key = len(made.ranks), int(made.ranks[0])
        found, by, named = [], [], Divisor()
        for tensor in made.wrong:
            if tensor.how != "factor" or not tensor.factor > 0:
                continue
            divisor = divisor_of(
                fault.factor * tensor.factor, size, window.world_size, micro, self.policy.exact
            )
            if divisor.known:
                found.append(tensor)
                by.append((tensor.name, divisor.value))
                named = divisor
        if not found or len({value for _, value in by}) > 1:
            state.divided.pop(key, None)
            return None
        known = state.divided.get(key)
        if known is None or known.tensors != tuple(by):
            known = state.divided[key] = Divided(tuple(by), made.step)
        known.count += 1
        if known.count < self.policy.held:
            return None
        return tuple(found), named, known.since

    def _streak(self, state: ReductionState, made: Reduction, weights: tuple[float, ...]) -> Streak:
        """How many in a row had these weights, or this factor."""
        key, exact = int(made.ranks[0]), self.policy.exact
        known = state.streaks.get(key)
        if known is not None and len(known.weights) == len(weights):
            near = exact * float(np.abs(weights).mean())
            if np.allclose(weights, known.weights, rtol=exact, atol=near):
                known.count += 1
                return known
        found = state.streaks[key] = Streak(weights, made.step)
        return found

    def _unexplained(self, state: ReductionState, fault: Fault) -> None:
        if state.kept >= self.policy.held and not state.unexplained:
            self._found(state, fault)
        else:
            state.unexplained += 1

    def _kept(self, state: ReductionState, step: int, *, usual: bool) -> None:
        state.kept += 1
        state.scaled += not usual
        state.watch.good(step)
        if usual:
            state.plain += 1
            state.notes.good(step)

    def _found(
        self,
        state: ReductionState,
        fault: Fault,
        *,
        first_step: int | None = None,
        note: bool = False,
    ) -> None:
        step = fault.reduction.step
        fault.note = note
        watch = state.notes if note else state.watch
        episode = watch.bad(step, fault, first_step=first_step)
        episode.facts.observed = episode.seen
