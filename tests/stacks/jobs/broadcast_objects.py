"""Rank 0 decides on weights, learning rate and order, and sends them by `broadcast_object_list`."""

import torch
import torch.distributed as dist

from tests.lab.faults.case import Expected
from tests.lab.faults.models import batches_of, epoch_steps
from tests.lab.faults.training import Manual
from tests.stacks.faults import Flip, OwnGradient, begin, cases

LAUNCH = "torchrun"
WORLD = 4
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]

THIRD_EPOCH = 2 * epoch_steps(WORLD)


def decided_by_first(decide):
    """What rank 0 decides, on every rank."""
    held = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held, src=0)
    return held[0]


class Broadcast(Manual):
    """Every rank draws weights of its own, and takes rank 0's; gradients are reduced by hand."""

    def first_seed(self):
        return super().first_seed() + 100 * self.rank

    def prepared(self):
        state = decided_by_first(self.net.state_dict)
        if self.takes_state():
            self.net.load_state_dict(state)

    def takes_state(self):
        return True

    def takes_rate(self, epoch):
        return True

    def part(self, epoch):
        """Which of the shares is this rank's."""
        return self.rank

    def decided(self, epoch):
        """What rank 0 decides before each epoch."""
        order = torch.randperm(len(self.training_set[0])).tolist()
        return {"lr": self.lr * 0.8**epoch, "order": order}

    def rows(self, epoch):
        plan = decided_by_first(lambda: self.decided(epoch))
        if self.takes_rate(epoch):
            for group in self.optimizer.param_groups:
                group["lr"] = plan["lr"]
        order = torch.tensor(plan["order"])
        yield from batches_of(order, rank=self.part(epoch), world=self.world)


class StateNotTaken:
    """One rank goes on with what it drew."""

    id = "state-not-taken"
    what = "one rank does not load the weights that rank 0 broadcast"
    onset = 0

    @property
    def suspects(self):
        """Never the one that broadcasts."""
        return max(super().suspects, 1)

    def takes_state(self):
        return not self.is_target

    def expected(self):
        return Expected(
            kinds=("desync.parameters",),
            stages=("start",),
            ranks=self.one(),
            severity="critical",
        )


class RateNotTaken:
    """One rank goes on with the last epoch's."""

    id = "rate-not-taken"
    what = "at the third epoch one rank does not take the learning rate that rank 0 broadcast"
    onset = THIRD_EPOCH

    def takes_rate(self, epoch):
        return not (self.is_target and epoch == 2)

    def expected(self):
        return Expected(
            kinds=("desync.hyperparameters",),
            stages=("hyperparameters",),
            ranks=self.one(),
            step=self.at,
        )


class AnothersShare:
    """Its own share is read by nobody."""

    id = "anothers-share"
    what = "from the third epoch on one rank reads the share of the next one"
    onset = THIRD_EPOCH

    @property
    def other(self):
        return (self.suspects + 1) % self.world

    def part(self, epoch):
        return self.other if self.is_target and epoch >= 2 else self.rank

    def expected(self):
        return Expected(
            kinds=("data.duplicated",),
            ranks=(frozenset({self.suspects, self.other}),),
            step=self.at,
        )


CASES = cases(Broadcast, StateNotTaken, RateNotTaken, AnothersShare, Flip, OwnGradient)
