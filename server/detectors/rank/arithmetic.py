"""Gradients of one rank that break a law which those of all others keep."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import count, number, ranks, sentences
from rankscope.server.detectors.policy import Count, Observations, Policy, Share, Times
from rankscope.server.window import ElementSums

_MAX_EVENTS = 64
# Samples from which on it is no event any more, but how the rank computes.
_OFTEN = 16


@dataclass(frozen=True, slots=True)
class ArithmeticPolicy(Policy):
    """When a sum that is to be zero is not.

    Attributes:
        law_share: largest sum that counts as zero up to rounding, as a share of what as many
            numbers of that norm sum up to by chance.
        law_looks: samples at which the sum has to be zero on all ranks to be a law.
        law_memory: number of samples whose largest sum is remembered: where gradients become small,
            what rounding leaves does not.
        law_factor: smallest broken sum as a multiple of the largest one remembered, and of any
            other rank's.
        law_certain: samples at which one rank broke the law and no other ever did, after which it
            is a fault for certain.
    """

    law_share: Share = 1e-5
    law_looks: Observations = 8
    law_memory: Observations = 64
    law_factor: Times = 30.0
    law_certain: Count = 3


@dataclass(slots=True, kw_only=True)
class Wrong(Incident):
    """A rank that breaks laws.

    Attributes:
        tensors: whose gradients broke theirs, the first one first.
        samples: at this many samples.
        share: the largest sum, as a share of what it would be by chance.
        usual: the largest such share of all ranks while they kept the law.
    """

    rank: int
    tensors: list[str]
    samples: int
    share: float
    usual: float


@dataclass(slots=True)
class _Law:
    """What is known of the sums of one tensor.

    Attributes:
        kept: samples at which all ranks kept it, since one at which several did not.
        sums: the largest sum of any rank at each of the last of them.
        share: the largest one as a share of what it would be by chance.
        pending: samples of one rank alone that broke it, step, rank and share: once it is seen to
            be kept again, it was that rank; until then it may be all of them.
    """

    sums: deque[float]
    kept: int = 0
    share: float = 0.0
    pending: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Arithmetic:
    """Follows the sums of all tensors, sample by sample.

    Whatever the batch, the gradients of a softmax's logits sum to zero over the classes, and so do
    those of the bias that is added to them; those of a bias before a layer normalisation do, too.
    Which tensors these are is found by looking: those of others do not, on no rank.

    Args:
        policy: thresholds.
    """

    policy: ArithmeticPolicy
    laws: dict[str, _Law] = field(default_factory=dict)
    wrong: dict[int, Wrong] = field(default_factory=dict)

    def observe(self, made: ElementSums) -> None:
        """Takes the sums of one step."""
        policy = self.policy
        usable = np.isfinite(made.norms).all(axis=0) & (made.norms > 0).all(axis=0)
        if not usable.any():
            return
        sums = np.abs(made.sums)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = sums / (made.norms * np.sqrt(made.sizes))
        broken: dict[tuple[int, int], list[tuple[str, float, float]]] = {}
        for column in np.flatnonzero(usable).tolist():
            name, of_ranks = made.names[column], shares[:, column]
            far = of_ranks > policy.law_share
            law = self.laws.get(name)
            if law is None:
                if far.any():
                    continue
                law = self.laws[name] = _Law(deque(maxlen=policy.law_memory))
            if not far.any():
                for step, rank, share in law.pending:
                    broken.setdefault((step, rank), []).append((name, share, law.share))
                law.pending.clear()
                law.kept += 1
                law.sums.append(float(sums[:, column].max()))
                law.share = max(law.share, float(of_ranks.max()))
                continue
            row = int(np.argmax(sums[:, column]))
            others = np.delete(sums[:, column], row).tolist()
            if far[row] and sums[row, column] > policy.law_factor * max([*others, *law.sums]):
                rank, share = int(made.ranks[row]), float(of_ranks[row])
                if law.kept < policy.law_looks:
                    continue
                if others:
                    broken.setdefault((made.step, rank), []).append((name, share, law.share))
                elif len(law.pending) < _MAX_EVENTS:
                    law.pending.append((made.step, rank, share))
            else:
                # Several ranks at once: gradients as small as rounding, or another loss by now.
                law.kept = 0
                law.pending.clear()
        for (step, rank), found in sorted(broken.items()):
            self._broken(step, rank, found, seen_step=made.step)

    def take(self) -> list[Finding]:
        """What is to be reported."""
        # Where several ranks break them, it is the trainer's way, or their data.
        alone = len(self.wrong) == 1
        return [
            _finding(wrong, certain=alone and wrong.samples >= self.policy.law_certain)
            for _, wrong in sorted(self.wrong.items())
        ]

    def _broken(
        self, step: int, rank: int, found: list[tuple[str, float, float]], *, seen_step: int
    ) -> None:
        wrong = self.wrong.get(rank)
        if wrong is None:
            wrong = self.wrong[rank] = Wrong(
                first_step=step,
                seen_step=seen_step,
                last_step=step,
                clear_after=0,
                rank=rank,
                tensors=[],
                samples=0,
                share=0.0,
                usual=0.0,
            )
        wrong.first_step = min(wrong.first_step, step)
        wrong.last_step = max(wrong.last_step, step)
        wrong.samples += 1
        for name, share, usual in found:
            if name not in wrong.tensors and len(wrong.tensors) < _MAX_EVENTS:
                wrong.tensors.append(name)
            wrong.share = max(wrong.share, share)
            wrong.usual = max(wrong.usual, usual)


def _is_rounding(wrong: Wrong) -> bool:
    """Whether a sum differs from zero again and again, by no more than rounding in 16 bits leaves.

    The unit roundoff of float16 is 2^-11, that of bfloat16 2^-8 (Higham, "Accuracy and Stability of
    Numerical Algorithms", 2002); in a sum of some terms, and against its size by chance, it is a
    few times more or a tenth of that.
    """
    return 2**-15 < wrong.share < 2**-6 and wrong.samples >= _OFTEN


def _finding(wrong: Wrong, *, certain: bool) -> Finding:
    who, step = ranks((wrong.rank,)), wrong.first_step
    named = wrong.tensors[0]
    return Finding(
        kind="rank.gradient_outlier",
        key=f"arithmetic:{wrong.rank}",
        severity="warning" if certain else "info",
        title=f"{who.capitalize()} computes gradients that cannot be right since step {step}",
        seen_step=wrong.seen_step,
        last_step=wrong.last_step,
        first_step=step,
        ranks=(wrong.rank,),
        tensors=tuple(wrong.tensors),
        cause=(
            f"Whatever the batch is, the gradient of `{named}` sums to zero (a number added before "
            "a softmax or a normalisation changes nothing): on all ranks to "
            f"{number(wrong.usual)} of its size, on {who} to {number(wrong.share)} at "
            f"{count(wrong.samples, 'sample')}. No data do that. "
            + (
                "What rounding in 16 bits leaves is of that size: it computes in a lower precision "
                "(autocast, `half`, `bfloat16`) than the other ranks, its device computes wrongly, "
                "or something changes its gradients before they are reduced."
                if _is_rounding(wrong)
                else "Its device computes wrongly at times, or something changes its gradients "
                "before they are reduced."
            )
            + ("" if certain else " Suspicious, not proven.")
        ),
        remedy=sentences(
            f"Compare the precision on {who} with the other ranks' (autocast, dtypes)."
            if _is_rounding(wrong)
            else "",
            f"Run step {wrong.last_step} of {who} again on another device: another gradient means "
            "a faulty one, to be taken out and tested. Look also for hooks on that rank alone.",
        ),
        # Faults that come and go are not over because none came for a while.
        clear_after=None,
        evidence={"share": wrong.share, "usual": wrong.usual, "looks": wrong.samples},
    )
