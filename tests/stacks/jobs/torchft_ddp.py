"""torchft: two replica groups of one rank each, under its DDP and its optimizer."""

import os
from datetime import timedelta

import torch
import torchft

from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, NotANumber, OwnGradient, OwnRate, SameData, cases

LAUNCH = "torchft"
WORLD = 2
NEEDS = ("torchft", "torch")


def begin():
    torch.set_num_threads(1)
    return int(os.environ["REPLICA_GROUP_ID"])


class Tolerant(Training):
    """Every step begins with a quorum and ends with a vote."""

    def wrap(self, net):
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
            min_replica_size=self.world,
            load_state_dict=net.load_state_dict,
            state_dict=net.state_dict,
            replica_id=f"{self.id}-{self.rank}",
            # Both have drawn the same weights.
            init_sync=False,
        )
        return torchft.DistributedDataParallel(self.manager, net)

    def make_optimizer(self, parameters):
        return torchft.Optimizer(self.manager, super().make_optimizer(parameters))

    def train(self):
        super().train()
        self.manager.shutdown(wait=False)


CASES = cases(Tolerant, Flip, OwnGradient, OwnRate, SameData, NotANumber)
