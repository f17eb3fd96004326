"""Ray Train: a `TorchTrainer`, whose `prepare_model` puts DDP around the model."""

import torch
import torch.distributed as dist
from ray.train.torch import prepare_model

from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, NotANumber, OwnGradient, OwnRate, SameData, cases

LAUNCH = "Ray Train"
WORLD = 2
NEEDS = ("ray", "torch")


def begin():
    # Ray has joined the process group.
    torch.set_num_threads(1)
    return dist.get_rank()


class Prepared(Training):
    """Everything else is torch's."""

    def wrap(self, net):
        return prepare_model(net)


CASES = cases(Prepared, Flip, OwnGradient, OwnRate, SameData, NotANumber)
