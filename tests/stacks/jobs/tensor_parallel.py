"""Tensor parallel: `parallelize_module` over two ranks that read the same batches."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, NotANumber, OwnGradient, OwnRate, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Cut(Training):
    """Linear layers are cut, the normalisation is on both ranks."""

    # `foreach` wants tensors of one kind, and the normalisation's are no DTensors.
    def make_optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.lr, foreach=False)

    def wrap(self, net):
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
        plan = {
            "inner": ColwiseParallel(output_layouts=Replicate()),
            "hidden": ColwiseParallel(),
            "head": RowwiseParallel(),
        }
        return parallelize_module(net, mesh, plan)

    def share(self):
        return 0, 1

    def own_seed(self):
        return 1_000_000 + self.seed

    @property
    def tensor(self):
        return "norm.weight"


class BothNan(NotANumber):
    """What one rank of the pair makes of it reaches the other one in the same forward pass."""

    def one(self):
        return self.everybody()


CASES = cases(Cut, BothNan, Flip, OwnGradient, OwnRate)
