"""Thresholds of `lr.too_low`."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.policy import Count, Number, Observations, Policy, Share


@dataclass(frozen=True, slots=True)
class LowPolicy(Policy):
    """Thresholds of `lr.too_low`.

    Attributes:
        evidence: losses that are needed before anything is judged.
        soon: losses that are enough where all steps so far together are negligible: the first half
            of them is averaged (`first`), and as many are compared with that.
        negligible: share of the parameters that they and as many more add up to then, at most, even
            if all have one direction: rounding a model to bfloat16 changes it by more.
        small_update: median update, relative to the parameters, below which it is too small;
            healthy medians lie above 4e-5.
        least_path: the same, of all steps so far together, where the answers are no better than a
            constant one: the steps add up to no more than this share of the parameters even if
            all have one direction, and a random initialisation is no answer but for some per cent.
        unexplained: share of the deviance explained, up to which they are no better.
        timid_update: median update below which steps are small, where gradients say the same again
            and again.
        timid_cosine: median cosine of the gradients of consecutive samples from which on they do:
            what steps of a usual size leave of it is noise.
        timid_explained: share of the deviance explained, below which all is still to be learned.
        whole_path: share of the parameters that all steps of the run together may come to, where
            gradients say the same again and again: healthy trainings from random parameters come to
            0.45 and more in 180 steps.
        whole_gain: share of the first losses that may have been gained then: who begins near a good
            answer is not asked to move.
        one_direction: median cosine from which on half of a gradient's power is that of the one
            before; less than `evidence` losses show it then.
        straight_path: as `whole_path`, of gradients that are: half of what healthy trainings come
            to.
        usual_update: update that the remedy aims at; usual is 1e-4 to 1e-2.
        updates: sampled updates that are needed before their size counts.
        min_gain: share of the first losses that has to be gained.
        learned: accuracy above which something was learned, if not in this run.
        collapsed: share of its peak to which the rate has to fall to have collapsed.
        wait: losses after the fall that are needed before it is judged.
        before: number of losses before the fall that show whether the loss was falling, and within
            which the rate has to fall.
        falling: smallest fall of the loss over these, as a share of the progress made.
        level: loss as a share of its start, below which nothing is left to be learned.
        gain_after: gain after the fall over that before it, from which on there is no fault.
        first: number of losses at the start that are averaged.
        ending: share of its peak below which a low rate is the end of a schedule.
    """

    evidence: Observations = 200
    soon: Observations = 100
    negligible: Share = 1e-3
    small_update: Share = 1e-5
    least_path: Share = 0.02
    unexplained: Share = 0.01
    timid_update: Share = 5e-4
    timid_cosine: Number = 0.25
    timid_explained: Share = 0.15
    whole_path: Share = 0.1
    whole_gain: Share = 0.5
    one_direction: Number = 0.7
    straight_path: Share = 0.25
    usual_update: Share = 1e-3
    updates: Count = 10
    min_gain: Share = 0.05
    learned: Share = 0.6
    collapsed: Share = 0.01
    wait: Observations = 100
    before: Observations = 60
    falling: Share = 0.03
    level: Share = 0.1
    gain_after: Share = 0.125
    first: Observations = 50
    ending: Share = 0.1
