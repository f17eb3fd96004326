"""What the demo can break, where, and what Rankscope has to say about it. No torch in here."""

from __future__ import annotations

import random
from dataclasses import dataclass

# The weights of `training.DigitsNet` among which a fault chooses its tensor.
TENSORS = ("conv1.weight", "conv2.weight", "hidden.weight", "output.weight")

DEFAULT_FAULT = "skipped-allreduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of the table.

    Attributes:
        what: what happens, in plain words.
        where: the place in the training loop at which it is injected.
        kinds: the one root alert must be of one of these kinds; empty: there must be none.
        names_rank: the alert has to name exactly the rank that was broken. Where not, the fault
            is on all ranks alike.
        names_tensor: it has to name exactly the tensor that was broken.
        tolerance: number of steps by which the alert's first step may lie beside the injected one.
            0 for what is compared bit by bit. What is found by statistics has an onset that the
            noise of the loss blurs.
        at_start: injected before the first step and not midway.
        ends_the_job: no rank comes to its last step.
        min_ranks: fewer give no answer.
        min_steps: fewer leave the statistics too little to judge.
    """

    name: str
    what: str
    where: str
    kinds: tuple[str, ...] = ()
    names_rank: bool = True
    names_tensor: bool = False
    tolerance: int = 0
    at_start: bool = False
    ends_the_job: bool = False
    min_ranks: int = 2
    min_steps: int = 60


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="none",
            what="nothing is broken: there must be no alert",
            where="nowhere",
            names_rank=False,
        ),
        Fault(
            name="skipped-allreduce",
            what=(
                "at one step, one rank takes part in the all-reduce but goes on with its own "
                "gradient of one tensor instead of the mean, as if it had read the buffer before "
                "the collective was done"
            ),
            where="in DDP's communication hook",
            kinds=("desync.gradients",),
            names_tensor=True,
        ),
        Fault(
            name="bitflip",
            what="one bit of one weight flips on one rank, as a memory fault would do it",
            where="between two optimizer steps",
            kinds=("desync.parameters",),
            names_tensor=True,
        ),
        Fault(
            name="high-lr",
            what="the learning rate is multiplied by 30 on all ranks",
            where="in the optimizer's parameter groups, from one step on",
            kinds=("loss.spike", "loss.diverging", "loss.oscillating", "loss.nonfinite"),
            names_rank=False,
            tolerance=20,
            min_steps=240,
        ),
        Fault(
            name="lr-mismatch",
            what="one rank's scheduler takes a step that the others do not: half the learning rate",
            where="in the optimizer's parameter groups, from one step on",
            kinds=("desync.hyperparameters",),
        ),
        Fault(
            name="bad-labels",
            what="one rank's labels are shuffled, as if its shard had been written wrongly",
            where="in the batch, from one step on",
            kinds=("rank.loss_outlier",),
            tolerance=20,
            min_ranks=3,
            min_steps=360,
        ),
        Fault(
            name="dead-rank",
            what="one rank is killed (SIGKILL); the others fail in their next all-reduce",
            where="before the forward pass of one step",
            kinds=("rank.silent",),
            tolerance=20,
            ends_the_job=True,
        ),
        Fault(
            name="nan",
            what="one pixel of one batch of one rank is NaN",
            where="in the batch of one step",
            kinds=("loss.nonfinite",),
        ),
        Fault(
            name="unsynced-start",
            what=(
                "one rank loads other weights after DDP has made all ranks equal, as a trainer "
                "does that restores its checkpoint too late"
            ),
            where="before the first step",
            kinds=("desync.parameters",),
            at_start=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault with everything about it decided.

    Attributes:
        rank: the rank that is broken; None where all are.
        step: first step that it touches; None for no fault.
        tensor: the parameter that it touches; None where it is none, or all.
    """

    fault: Fault
    rank: int | None = None
    step: int | None = None
    tensor: str | None = None

    def expected_ranks(self, world_size: int) -> tuple[int, ...]:
        """Ranks that the alert must name.

        With two ranks, nothing shows which of two different copies is the wrong one: a desync then
        names both.
        """
        if self.rank is None:
            return ()
        if world_size == 2 and any(kind.startswith("desync.") for kind in self.fault.kinds):
            return (0, 1)
        return (self.rank,)


def decide(fault: Fault, *, ranks: int, steps: int, seed: int) -> Injection:
    """Rank, step and tensor of a fault, the same for the same seed.

    The step lies in the middle tenth of the run: late enough for the statistics to know how the run
    behaves, early enough for them to see the consequences.
    """
    if not fault.kinds:
        return Injection(fault)
    choice = random.Random(f"{fault.name}/{seed}")
    rank = choice.randrange(ranks)
    step = 0 if fault.at_start else steps * 9 // 20 + choice.randrange(max(steps // 10, 1))
    tensor = choice.choice(TENSORS)
    return Injection(
        fault,
        rank=rank if fault.names_rank else None,
        step=step,
        tensor=tensor if fault.names_tensor else None,
    )
