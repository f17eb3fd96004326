"""The data ledger: what each rank read, what came again, and what two ranks had both. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankscope.agent.wire import NO_SAMPLE, Float64, Int64
from rankscope.server.window import BatchesRead

UInt64 = npt.NDArray[np.uint64]

# How samples are counted, in this order; see `Ledger.of_ranks`.
CLASSES = ("new", "earlier_pass", "own_again", "other_rank")
# Samples that are gone through. When there are more, every second one is, on all ranks the same.
_MOST = 400_000
# Operations of the comparison of all pairs: about a second of one core.
_MOST_WORK = 2e10
# Samples that are compared at a time: a block of them for 1,024 ranks has 16 MiB.
_BLOCK = 4096
# A pass through the data ends where most of what comes has come in it before, as long as this many
# samples. One batch reports up to 16: by chance this is no rank's order.
_ENOUGH = 32


@dataclass(frozen=True, slots=True)
class Ledger:
    """R ranks, S steps of which batches are known.

    Attributes:
        ranks: int64 [R], ascending.
        steps: int64 [S], ascending.
        by_samples: single samples were identified; else whole batches count as samples.
        halvings: how often only every second sample was gone through.
        passes: steps at which a pass through the data begins, the first one included.
        batches: int64 [R]: batches that are known.
        same_step: int64 [R]: those that another rank read at the same step.
        of_ranks: int64 [R, 4]: samples by `CLASSES`: that nobody had read before; that somebody had
            read in an earlier pass through the data; that the rank itself had read in this pass;
            that another rank had read in this pass (of one step, a rank of a lower number).
        of_steps: int64 [S, 4]: the same by steps.
        shared: float64 [R, R]: share of the samples of a pass that both ranks had, of those of the
            one that had fewer; NaN on the diagonal, and where one of them has none.
    """

    ranks: Int64
    steps: Int64
    by_samples: bool
    halvings: int
    passes: tuple[int, ...]
    batches: Int64
    same_step: Int64
    of_ranks: Int64
    of_steps: Int64
    shared: Float64


@dataclass(slots=True)
class _Passes:
    """Where passes through the data begin.

    Attributes:
        begins: first step of each.
        seen: samples of the pass that goes on.
        again: samples of steps that may belong to the next one, which would begin at `since`.
    """

    begins: list[int]
    seen: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    count: int = 0
    since: int = -1

    def push(self, step: int, items: Sequence[int]) -> None:
        """Takes the samples of a step."""
        own = set(items)
        if 2 * sum(item in self.seen for item in items) > len(items):
            self.since = step if self.since < 0 else self.since
            self.again |= own
            self.count += len(items)
            if self.count >= _ENOUGH:
                self.begins.append(self.since)
                self.seen, self.again, self.count, self.since = self.again, set(), 0, -1
            return
        self.seen |= self.again | own
        self.again, self.count, self.since = set(), 0, -1


def ledger(read: BatchesRead, *, epoch: float = math.nan) -> Ledger:
    """What the batches of all ranks show, taken together.

    Passes through the data show in the samples where most steps are sampled; where few are, and no
    sample of a step has been seen before, they follow from the length of the loader.

    Args:
        epoch: batches of a rank's loader; NaN where they are not known.
    """
    ranks, row = np.unique(read.ranks, return_inverse=True)
    steps, column = np.unique(read.steps, return_inverse=True)
    by_samples = bool((read.samples != NO_SAMPLE).any())
    if by_samples:
        batch, place = np.nonzero(read.samples != NO_SAMPLE)
        items = read.samples[batch, place].astype(np.uint64)
    else:
        batch, items = np.arange(len(read.digests)), read.digests
    halvings = max(0, math.ceil(math.log2(max(len(items), 1) / _MOST)))
    # Digests are spread evenly, in their low bits as well.
    kept = items & np.uint64((1 << halvings) - 1) == 0
    items, row_of, column_of = items[kept], row[batch[kept]], column[batch[kept]]
    begins = _passes(items, column_of, steps)
    if epoch >= 1 and len(steps):
        by_loader = np.unique(steps[0] + (steps - steps[0]) // epoch * epoch).astype(np.int64)
        begins = max(begins, by_loader, key=len)
    number = np.searchsorted(begins, steps, side="right") - 1
    kind, first = _classes(items, number[column_of], row_of, column_of)
    shared = _shared(items[first], number[column_of][first], row_of[first], len(ranks))
    return Ledger(
        ranks=ranks,
        steps=steps,
        by_samples=by_samples,
        halvings=halvings,
        passes=tuple(begins.tolist()),
        batches=np.bincount(row, minlength=len(ranks)),
        same_step=_at_one_step(read.digests, row, column, len(ranks)),
        of_ranks=_tally(row_of, kind, len(ranks)),
        of_steps=_tally(column_of, kind, len(steps)),
        shared=shared,
    )


def _passes(items: UInt64, column: Int64, steps: Int64) -> Int64:
    """First step of each pass."""
    found = _Passes([int(steps[0])] if len(steps) else [])
    order = np.argsort(column, kind="stable")
    ends = np.cumsum(np.bincount(column, minlength=len(steps)))
    held = items[order].tolist()
    for n, end in enumerate(ends.tolist()):
        begin = int(ends[n - 1]) if n else 0
        if begin < end:
            found.push(int(steps[n]), held[begin:end])
    return np.array(found.begins, np.int64)


def _classes(
    items: UInt64, number: Int64, row: Int64, column: Int64
) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Place in `CLASSES` of each sample, and whether it is its rank's first in this pass; [N]."""
    order = np.lexsort((column, row, number, items))
    changes = items[order][1:] != items[order][:-1]
    of_pass = changes | (number[order][1:] != number[order][:-1])
    of_rank = of_pass | (row[order][1:] != row[order][:-1])
    first = np.zeros(len(items), np.bool_)
    first[order] = np.append(True, of_rank)[: len(items)]
    # Of several ranks that have a sample the one that had it first.
    order = np.lexsort((row, column, number, items))
    begins = np.append(True, items[order][1:] != items[order][:-1])[: len(items)]
    in_pass = begins | np.append(True, number[order][1:] != number[order][:-1])[: len(items)]
    new, opens = np.zeros((2, len(items)), np.bool_)
    new[order], opens[order] = begins, in_pass
    kind = np.where(first, 3, 2)
    kind[opens] = 1
    kind[new] = 0
    return kind, first


def _tally(place: Int64, kind: Int64, count: int) -> Int64:
    flat = np.bincount(place * len(CLASSES) + kind, minlength=count * len(CLASSES))
    return flat.reshape(count, len(CLASSES))


def _at_one_step(digests: UInt64, row: Int64, column: Int64, count: int) -> Int64:
    """Batches of each rank that another one had at the same step."""
    order = np.lexsort((digests, column))
    after = (column[order][1:] == column[order][:-1]) & (digests[order][1:] == digests[order][:-1])
    alike = np.zeros(len(digests), np.bool_)
    alike[order[1:]] |= after
    alike[order[:-1]] |= after
    return np.bincount(row[alike], minlength=count)


def _shared(items: UInt64, number: Int64, row: Int64, count: int) -> Float64:
    """[R, R]: see `Ledger.shared`; of samples that a rank has once in a pass."""
    sizes = np.bincount(row, minlength=count)
    order = np.lexsort((row, number, items))
    items, number, row = items[order], number[order], row[order]
    changes = (items[1:] != items[:-1]) | (number[1:] != number[:-1])
    group = np.cumsum(np.append(True, changes)[: len(items)]) - 1
    several = (np.bincount(group) > 1)[group] if len(group) else np.zeros(0, np.bool_)
    _, group = np.unique(group[several], return_inverse=True)
    row = row[several]
    groups = int(group[-1]) + 1 if len(group) else 0
    # Of too many some, evenly: the order is that of the hashes, which are as good as drawn.
    stride = max(1, math.ceil(groups * count**2 / _MOST_WORK))
    taken = group % stride == 0
    group, row = group[taken] // stride, row[taken]
    both = np.zeros((count, count))
    for begin in range(0, groups, _BLOCK):
        a, b = np.searchsorted(group, (begin, begin + _BLOCK))
        if a == b:
            break
        held = np.zeros((_BLOCK, count), np.float32)
        held[group[a:b] - begin, row[a:b]] = 1.0
        both += held.T @ held
    fewer = np.minimum(sizes[:, None], sizes[None, :])
    np.fill_diagonal(fewer, 0)
    share: Float64 = np.full((count, count), np.nan)
    np.divide(both * stride, fewer, out=share, where=fewer > 0)
    np.minimum(share, 1.0, out=share)
    return share
