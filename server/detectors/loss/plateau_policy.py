"""Thresholds of `loss.plateau`."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.policy import Observations, Policy, Share, Sigmas, Times


@dataclass(frozen=True, slots=True)
class PlateauPolicy(Policy):
    """Thresholds of `loss.plateau`.

    Attributes:
        evidence: losses that are needed before anything but answers worth nothing is judged.
        soon: losses after which these are: of 67 healthy trainings whose answers were known, none
            had explained so little in its second half by then without explaining more and more.
        min_gain: share of the first losses that has to be gained.
        rate: learning rate as a share of the highest so far, below which a step is not meant to
            teach anything.
        small_update: update, relative to the parameters, with which nothing can be learned in
            hundreds of steps.
        timid_update: median update below which a rate may be too low, and is not too high: a half
            of what is usual.
        learned: accuracy above which something was learned, if not in this run.
        accuracy_gain: rise of the accuracy since the start up to which nothing was gained, or more
            where `gain_error` allows it.
        gain_error: standard errors of that rise that count as no gain.
        first: number of losses at the start that are averaged.
        last: number of most recent losses averaged.
        explained: share of the deviance explained, up to which the model knows nothing of the
            targets: a hundredth is less than any model is used for.
        most_explained: largest such share where single batches scatter so much that less cannot be
            distinguished from 0, and largest share plus 3 standard errors.
        shares: observations of that share that are needed.
        falling: Mann-Kendall Z, below 0, from which on the most recent losses still fall: one of
            160 flat ones reaches it, and is examined again 10 losses later.
        arriving: the same where the answers are still worse than a constant one, beyond doubt: who
            has so far to go is likely on the way. One of three flat ones reaches it, and a fall
            that -2.5 shows half of the time, 49 of 50 times.
        rash_begin: largest update of the first steps, relative to the parameters, from which on the
            initialisation is overwritten: one step changes a tenth of it.
        rash: median of the most recent updates from which on they are too large; healthy medians
            reach 7e-3.
        poor: share of the deviance explained, below which much is left to be learned: two tasks in
            turns, one of them hard, come to more.
        worse: share below 0 from which on the answers are far worse than the best constant one:
            neither the noise of a model that is about to learn nor a fit to other samples of the
            same data makes the loss half as large again.
        scale: size of the outputs over that of the targets, from which on the two are of one size.
        visits: times that a sample has come on average, up to which what a training learns is no
            memory of its samples: labels at random take tens of epochs to be fitted (Zhang et al.
            2017).
        inputs_grown: times by which inputs have grown or shrunk since the first ones, from which on
            they are others: batches of one source stay within half of that.
        large_inputs: root mean square of the inputs from which on they are not scaled: networks are
            initialised for 1, pixels up to 255 have 100.
        nearing: share of its excess over a constant answer's that the loss loses in the second half
            of the run, from which on it is on its way there: so it comes to a tenth of what it was
            in six times as many steps.
        guessed: distance of the loss from the logarithm of the number of answers, as a share of it,
            up to which it is that of guessing: classes whose numbers differ by three times have an
            entropy that is less by so much.
        young: share of the parameters that all steps so far come to together, below which a model
            may have learned the frequencies of its targets and no more: transformers of the drawn
            lab that do so have come to 0.13 to 0.22 then, other models to 0.5 and more.
        grown: losses after which a model is no longer young, however little it has moved: steps of
            3e-4, a third of the usual, have come to `young` by then.
        stands: losses after which one of which nothing else is known, and that is where it began,
            says so by itself.
        stands_gain: share of it that may have been gained or lost then.
        stands_path: share of the parameters that the steps have come to by then: of healthy models
            0.5 and more.
        vanished: median of the most recent gradient norms, as a share of the first ones, below
            which the gradient is gone though nothing was learned: that of noise alone stays.
    """

    evidence: Observations = 200
    soon: Observations = 120
    min_gain: Share = 0.05
    rate: Share = 0.1
    small_update: Share = 1e-5
    timid_update: Share = 5e-4
    learned: Share = 0.6
    accuracy_gain: Share = 0.05
    gain_error: Sigmas = 3.0
    first: Observations = 50
    last: Observations = 100
    explained: Share = 0.01
    most_explained: Share = 0.05
    shares: Observations = 20
    falling: Sigmas = 2.5
    arriving: Sigmas = 0.5
    rash_begin: Share = 0.1
    rash: Share = 1e-2
    poor: Share = 0.65
    worse: Share = 0.5
    scale: Share = 0.5
    visits: Times = 4.0
    inputs_grown: Times = 3.0
    large_inputs: float = 30.0
    nearing: Share = 1 / 3
    guessed: Share = 0.1
    young: Share = 0.3
    grown: Observations = 1000
    stands: Observations = 250
    stands_gain: Share = 0.02
    stands_path: Share = 0.5
    vanished: Share = 0.1
