"""Gradients that break a law: those of a real softmax, with what goes wrong put into them."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.rank.arithmetic import Arithmetic, ArithmeticPolicy
from rankscope.server.window import ElementSums

CLASSES, BATCH = 10, 16


def gradient(generator, *, sharp=1.0):
    """Of the bias before a softmax, in float32: mean of p - y over a batch."""
    logits = generator.normal(scale=2.0, size=(BATCH, CLASSES))
    # Sharper ones are those of a model that has learned: most samples are right by far.
    targets = logits.argmax(1)
    logits = (sharp * logits).astype(np.float32)
    odds = np.exp(logits - logits.max(1, keepdims=True))
    chances = odds / odds.sum(1, keepdims=True)
    chances[np.arange(BATCH), targets] -= 1
    return chances.mean(0)


def sums(step, gradients):
    """As they come from the sketches: exact sums of float32 numbers."""
    held = np.array(gradients, np.float64)[:, None, :]
    return ElementSums(
        step=step,
        ranks=np.arange(len(held)),
        names=("head.bias",),
        sizes=np.array([CLASSES]),
        sums=held.sum(2),
        norms=np.sqrt((held**2).sum(2)),
    )


def reported(
    steps,
    wrong,
    *,
    ranks=4,
    is_sampled=lambda step, rank: True,
    sharp=lambda step: 1.0,
    scale=lambda step, rank: 1.0,
    seed=0,
):
    """What is found where `wrong(step, rank, gradient, generator)` gives what a rank computes."""
    generator = np.random.default_rng(seed)
    arithmetic = Arithmetic(ArithmeticPolicy())
    for step in range(steps):
        own = [gradient(generator, sharp=sharp(step)) for _ in range(ranks)]
        own = [
            np.float32(scale(step, rank)) * wrong(step, rank, made, generator)
            for rank, made in enumerate(own)
        ]
        made = sums(step, own)
        there = np.array([rank for rank in range(ranks) if is_sampled(step, rank)])
        if len(there):
            made = replace(
                made, ranks=made.ranks[there], sums=made.sums[there], norms=made.norms[there]
            )
            arithmetic.observe(made)
    return arithmetic.take()


def noisy(made, generator, size=1e-3):
    noise = generator.normal(size=made.shape) * np.linalg.norm(made) / np.sqrt(made.size)
    return (made + size * noise).astype(np.float32)


def healthy(step, rank, made, generator):
    return made


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_thousandth_of_noise_now_and_then_is_seen(ranks):
    def wrong(step, rank, made, generator):
        return noisy(made, generator) if rank == 1 and step % 20 == 13 else made

    (finding,) = reported(100, wrong, ranks=ranks)
    assert finding.kind == "rank.gradient_outlier"
    assert (finding.ranks, finding.tensors) == ((1,), ("head.bias",))
    assert (finding.first_step, finding.severity) == (13, "warning")
    assert finding.evidence["usual"] < 1e-6 < 1e-5 < finding.evidence["share"]


def test_a_rank_that_computes_in_16_bits_is_said_to_do_so():
    def wrong(step, rank, made, generator):
        return made.astype(np.float16).astype(np.float32) if rank == 1 and step >= 10 else made

    (finding,) = reported(100, wrong)
    assert (finding.ranks, finding.severity) == ((1,), "warning")
    assert "lower precision" in finding.cause
    assert "dtypes" in finding.remedy


def alternating(step, rank):
    """Eight samples of all ranks, then of one after the other."""
    return step < 8 or step % 2 == rank


def test_samples_of_one_rank_alone_count_once_the_law_is_seen_to_be_kept_again():
    def wrong(step, rank, made, generator):
        return noisy(made, generator) if rank == 1 and step % 20 == 13 else made

    (finding,) = reported(100, wrong, ranks=2, is_sampled=alternating)
    assert (finding.ranks, finding.first_step, finding.severity) == ((1,), 13, "warning")


def test_another_loss_is_no_fault_of_the_rank_that_is_sampled_first():
    def wrong(step, rank, made, generator):
        return made + np.float32(0.01) * made.max() if step >= 50 else made

    assert not reported(200, wrong, ranks=2, is_sampled=alternating)


def test_one_sample_is_no_proof():
    def wrong(step, rank, made, generator):
        return noisy(made, generator) if rank == 1 and step == 30 else made

    (finding,) = reported(100, wrong)
    assert finding.severity == "info"
    assert "not proven" in finding.cause


def test_several_ranks_that_break_it_are_no_fault_of_one():
    def wrong(step, rank, made, generator):
        return made + np.float32(1e-3) if step % 10 == 5 + rank and step > 20 else made

    assert {finding.severity for finding in reported(100, wrong)} == {"info"}


@pytest.mark.parametrize("seed", range(20))
def test_a_model_that_learns_to_the_end_keeps_it(seed):
    """Its gradients become as small as what rounding leaves of 1."""
    assert not reported(300, healthy, sharp=lambda step: 1.0 + step / 10, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_scaled_losses_keep_it(seed):
    def scale(step, rank):
        return 2.0 ** (step // 20) * (100.0 if rank == 2 and step > 50 else 1.0)

    assert not reported(200, healthy, scale=scale, seed=seed)


def test_another_loss_from_some_step_on_ends_it():
    def wrong(step, rank, made, generator):
        return made + np.float32(0.01) * made.max() if step >= 50 else made

    assert not reported(200, wrong)


def test_what_never_summed_to_zero_is_no_law():
    def wrong(step, rank, made, generator):
        return generator.normal(size=made.shape).astype(np.float32)

    assert not reported(100, wrong)
