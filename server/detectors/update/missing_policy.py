"""Thresholds of `update.missing`."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.policy import Count, Observations, Policy, Seconds, Share, Times


@dataclass(frozen=True, slots=True)
class MissingPolicy(Policy):
    """Thresholds of `update.missing`.

    Attributes:
        some: consecutive checked steps at which a tensor did not change, before it is reported.
        everything: consecutive checked steps at which nothing in the model changed, before it is
            reported.
        small_rate: learning rate as a share of the highest, below which tensors may stand still.
        converged: gradient norm as a share of the first ones, below which they may, too.
        never: consecutive samples, over at least as many steps, at which the tensors that the
            optimizer does not hold were as at first: another optimizer that moves them now and then
            has done so by then.
        accumulated: backward passes without any step of the optimizer, from which on it is no
            accumulation; who accumulates takes some tens, and few hundreds.
        left_behind: steps by which other ranks are ahead of one that computes on without a step,
            and as many of its passes, from which on it is none that will come.
        longest_steps: time without a step, after steps that came, as a multiple of the longest of
            them: what else a loop does in between (an evaluation, a checkpoint) is in that.
        without: seconds without a step, where that is longer; an evaluation that is not called one
            ends within it in trainings that are short.
        in_vain: backward passes after the last step of a run that has ended, over all those that
            came to a step, from which on they were meant to come to one, too: what else is computed
            after a training (scores of inputs, a report) takes a fraction of it.
        forgotten: share of the trained tensors up to which those left out were probably forgotten;
            who trains a part of a model on purpose leaves out most of it.
        learns: share of the loss gained so far, below which what is trained alone learns next to
            nothing, and leaving out the rest was hardly on purpose.
        judged: losses before that is asked.
    """

    some: Observations = 4
    everything: Observations = 2
    small_rate: Share = 1e-3
    converged: Share = 1e-5
    never: Observations = 8
    accumulated: Observations = 512
    left_behind: Count = 32
    longest_steps: Times = 10.0
    without: Seconds = 30.0
    in_vain: Share = 0.5
    forgotten: Share = 0.5
    learns: Share = 0.05
    judged: Observations = 200
