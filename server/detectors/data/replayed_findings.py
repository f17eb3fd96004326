"""What is reported of batches that come again: an order that repeats, or one batch for ever."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    if_several,
    number,
    ranks,
    sentences,
)

# Samples in the memory that a batch is a view of, over those of the batch, from which on there were
# others to train on. Who trains on a part of the data as one batch takes a train split, or a small
# subset; a batch of 64 of 1,000 samples and more is less than a sixteenth.
_STORED = 16.0
# Samples of what is a batch by its size: data sets have such a number by chance only. 8 are the
# least, as exercises with 2 or 4 samples are whole, and 128 the most: above that, points at which
# an equation is solved, or all samples of a class room's set, are as likely.
_BATCHES = frozenset((8, 16, 32, 64, 128))
# Observations of one batch from which on such a one is no test of whether a model can overfit.
_LONG = 100


@dataclass(slots=True)
class Repeat:
    """A sequence that came before.

    Attributes:
        distance: steps between the two.
        earlier: step of what its first batch repeats.
        restarted: ranks whose process had begun right before it; empty: an ordinary epoch.
        length: observations of it so far.
        ranks: those whose batches were examined.
    """

    distance: int
    earlier: int
    restarted: tuple[int, ...]
    length: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Stuck:
    """One batch that all steps have.

    Attributes:
        length: observations of it in a row.
        varied: there were others before.
        ranks: whose it is.
        batches: of the DataLoader that gives them; 0 where it is not known.
        stored: samples in the memory that the batch is a part of, over those in the batch.
        samples: those in the batch; 0 where it is not known.
        sequences: they are sequences of tokens: no text is as short as a batch of them.
        shared: several ranks have the same one: synthetic inputs, as in tests of speed.
    """

    length: int
    varied: bool
    ranks: tuple[int, ...]
    batches: int = 0
    stored: float = 0.0
    samples: int = 0
    sequences: bool = False
    shared: bool = False

    @property
    def more(self) -> bool:
        """Whether there were more data to be had than this batch."""
        return self.varied or self.batches > 1 or self.stored >= _STORED

    @property
    def likely(self) -> bool:
        """Whether it is a batch by its size, and nothing shows that it is all there is."""
        size = self.samples in _BATCHES or (self.sequences and self.samples <= max(_BATCHES))
        return self.length > _LONG and size and self.batches != 1 and not self.shared


def repeat_finding(episode: Episode[Repeat], *, by_labels: bool = False) -> Finding:
    """An order of batches that comes again; of their labels alone, where `by_labels` says so."""
    repeat, step = episode.facts, episode.first_step
    seen = ""
    if by_labels:
        seen = (
            f"The labels of {count(repeat.length, 'batch')} in a row are the same as before; the "
            "inputs differ, as random augmentation makes them."
        )
    if repeat.restarted:
        who = ranks(repeat.restarted)
        verb = agree(len(repeat.restarted), "has")
        title = f"Batches are replayed since the restart at step {step}"
        cause = sentences(
            f"{who.capitalize()} {verb} begun anew at step {step}, and the batches since then are "
            f"those of step {repeat.earlier} on, in the same order: the model was resumed and the "
            "data were not.",
            f"{repeat.length:,} batches have been used twice so far.",
            seen,
        )
        remedy = (
            "Save the position in the data with the checkpoint and restore it (a stateful "
            "loader, or skip the batches that were used), or seed the sampler with the epoch."
        )
    else:
        title = f"Batches come in the same order again since step {step}"
        cause = sentences(
            f"From step {step} on, the batches of step {repeat.earlier} on come once more"
            f"{if_several(len(repeat.ranks), 'on every rank')}, in the same order, "
            f"{count(repeat.distance, 'step')} apart: an epoch "
            "is not shuffled, or shuffled like the one before it.",
            seen,
        )
        remedy = (
            "Call `sampler.set_epoch(epoch)` before each epoch (a `DistributedSampler` shuffles "
            "by seed and epoch), or set `shuffle=True`. Nothing, if the order is meant."
        )
    return episode.finding(
        kind="data.replayed" if repeat.restarted else "data.unshuffled",
        severity="warning",
        title=title,
        ranks=repeat.restarted or repeat.ranks,
        stage="batch",
        cause=cause,
        remedy=remedy,
        evidence={
            "distance": repeat.distance,
            "earlier_step": repeat.earlier,
            "length": repeat.length,
            "by_labels": by_labels,
            "restarted": list(repeat.restarted),
        },
    )


def stuck_finding(episode: Episode[Stuck]) -> Finding:
    """One batch at all steps."""
    stuck, step = episode.facts, episode.first_step
    several = if_several(len(stuck.ranks), "of every rank")
    return episode.finding(
        kind="data.unshuffled",
        key="stuck",
        severity="warning" if stuck.more or stuck.likely else "info",
        title=f"Every batch is the same one since step {step}",
        ranks=stuck.ranks,
        stage="batch",
        cause=(
            f"The batches{several} have been the same, bit for bit, at {stuck.length:,} checked "
            "steps in a row: the model memorises one batch. "
            + _beside(stuck)
            + (
                "There were others before: the loader, or a buffer or cache between, gives its "
                "last batch again and again."
                if stuck.varied
                else "Usual causes: `next(iter(loader))` at every step, which begins the loader "
                "anew, a batch that is fetched before the loop, a cache."
            )
        ),
        remedy=(
            "Iterate over the loader (`for batch in loader`), and look at what lies between it and "
            "the model. Nothing, if all of the data are in one batch, or it is a test with "
            "synthetic data."
        ),
        evidence={
            "length": stuck.length,
            "varied": stuck.varied,
            "batches": stuck.batches,
            "stored": stuck.stored,
            "samples": stuck.samples,
        },
    )


def _beside(stuck: Stuck) -> str:
    """What there is beside the batch, as a sentence and a space; empty where nothing is known."""
    if stuck.batches > 1:
        return f"The loader has {stuck.batches:,}, of which only this one is used. "
    if stuck.stored >= _STORED:
        return f"It is a part of data that are {number(stuck.stored)} times as large. "
    if stuck.likely and not stuck.varied:
        return (
            f"With {stuck.samples} samples it has the size of a batch; if that is all there is to "
            "train on, silence this kind. "
        )
    return ""
