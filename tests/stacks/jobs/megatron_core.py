"""Megatron-core: tensor parallel inside pairs, data parallel between them."""

import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent
from tests.stacks import faults
from tests.stacks.faults import Flip, NotANumber, OwnRate, Prepared, SameData, cases

LAUNCH = "torchrun"
WORLD = 4
NEEDS = ("megatron", "torch")


def begin():
    rank = faults.begin()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return rank


class Parallel(nn.Module):
    """The lab's three dense layers, the inner two of them split as Megatron splits an MLP."""

    def __init__(self):
        super().__init__()
        config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
        self.inner = ColumnParallelLinear(
            64, 32, config=config, init_method=nn.init.xavier_normal_, gather_output=False
        )
        self.hidden = RowParallelLinear(
            32,
            32,
            config=config,
            init_method=nn.init.xavier_normal_,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, inputs):
        inner, _ = self.inner(inputs)
        hidden, _ = self.hidden(torch.relu(inner))
        return self.head(torch.relu(self.norm(hidden)))


class Megatron(Prepared):
    """Ranks {0, 1} and {2, 3} hold a model each, {0, 2} and {1, 3} the same parts of it."""

    def build(self):
        return Parallel()

    def wrap(self, net):
        group = parallel_state.get_data_parallel_group()
        return DistributedDataParallel(net, process_group=group)

    def share(self):
        rank = parallel_state.get_data_parallel_rank()
        return rank, parallel_state.get_data_parallel_world_size()

    def watch(self, **options):
        return agent.megatron.attach(self.model, self.optimizer, **options)


class ShardFlip(Flip):
    """In what one pair of ranks holds."""

    @property
    def tensor(self):
        return "inner.weight"

    def odd_one(self):
        pair = frozenset({self.suspects, (self.suspects + 2) % 4})
        return (frozenset({self.suspects}), pair)


class NormFlip(Flip):
    """In what all four ranks hold: three agree."""

    id = "flip-norm"

    @property
    def tensor(self):
        return "norm.weight"


class BothNan(NotANumber):
    """What one rank of a pair makes of it reaches the other one in the same forward pass."""

    def one(self):
        return (frozenset({self.suspects, self.suspects ^ 1}),)


CASES = cases(Megatron, ShardFlip, NormFlip, OwnRate, SameData, BothNan)
