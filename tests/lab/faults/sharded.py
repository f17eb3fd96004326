"""Models that no rank holds as a whole: FSDP2, tensor parallel, a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.lab.faults.models import BATCH
from tests.lab.faults.training import Training
from tests.support.fully_sharded import fully_shard


class Sharded(Training):
    """FSDP2.

    Attributes:
        replicated: HSDP: two replicas of two shards each.
    """

    models = ("mlp", "transformer")
    steps = 40
    replicated: ClassVar[bool] = False

    def wrap(self, net: nn.Module) -> nn.Module:
        """Shards it."""
        if self.replicated:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("shard",))
        fully_shard(net, mesh=mesh)
        return net


def zero_1(parameters: Iterable[nn.Parameter], lr: float) -> Any:
    """AdamW whose state is dealt out to the ranks."""
    # Importing it compiles functions for TorchScript, of which torch itself warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)


class _SumForward(torch.autograd.Function):
    """Sums over the tensor-parallel ranks in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class TwoHalves(nn.Module):
    """A normalisation that both ranks of a pair hold, and two linear layers cut in halves."""

    def __init__(self, part: int, group: Any, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.drop = nn.Dropout(dropout)
        whole = nn.Linear(64, 32, bias=False), nn.Linear(32, 10, bias=False)
        half = slice(16 * part, 16 * part + 16)
        self.column = nn.Linear(64, 16, bias=False)
        self.row = nn.Linear(16, 10, bias=False)
        self.column.weight = nn.Parameter(whole[0].weight[half].detach().clone())
        self.row.weight = nn.Parameter(whole[1].weight[:, half].detach().clone())
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, 10] of [N, 64], the same on both ranks."""
        x = torch.relu(self.column(self.drop(self.norm(x))))
        summed: Any = _SumForward.apply
        logits: torch.Tensor = summed(self.row(x), self._group)
        return logits


class TensorParallel(Training):
    """Pairs of ranks share a model by hand; pairs are data-parallel. Both read the same batch."""

    models = ("mlp",)

    def prepare(self) -> None:
        """Groups first: the model needs them."""
        pairs = [dist.new_group([i, i + 1]) for i in range(0, self.world, 2)]
        columns = [dist.new_group(list(range(i, self.world, 2))) for i in range(2)]
        self.pair, self.part = divmod(self.rank, 2)
        self.tensor_group, self.data_group = pairs[self.pair], columns[self.part]
        super().prepare()

    def own_seed(self) -> int:
        """The same for both ranks of a pair."""
        return 1_000_000 + 1000 * self.seed + self.pair

    def share(self) -> tuple[int, int]:
        """The pair's."""
        return self.pair, self.world // 2

    def build(self) -> nn.Module:
        """This rank's half."""
        return TwoHalves(self.part, self.tensor_group, self.dropout)

    def wrap(self, net: nn.Module) -> nn.Module:
        """There is no wrapper."""
        return net

    def attached(self) -> None:
        """Which rank holds which half cannot be read off the tensors."""
        for name in ("column.*", "row.*"):
            self.monitor.replicas(f"half {self.part}", name)

    def sum_shared(self) -> None:
        """What both ranks of a pair hold has a gradient of which each has a part."""
        for name in ("norm.weight", "norm.bias"):
            dist.all_reduce(self.parameter(name).grad, group=self.tensor_group)

    def reduce(self) -> None:
        """Over the pair, then over the pairs."""
        self.sum_shared()
        if self.world > 2:
            gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=self.data_group)
            flat /= self.world // 2
            for gradient, part in zip(
                gradients, flat.split([g.numel() for g in gradients]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))


class _FirstStage(nn.Module):
    def __init__(self, embeddings: nn.Embedding) -> None:
        super().__init__()
        self.word_embeddings = embeddings
        self.body = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = torch.relu(self.body(self.word_embeddings(x))).mean(1)
        return h


class _LastStage(nn.Module):
    def __init__(self, embeddings: nn.Embedding) -> None:
        super().__init__()
        self.final = nn.LayerNorm(32)
        self.word_embeddings = embeddings

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.final(h), self.word_embeddings.weight)


class Pipeline(Training):
    """Two stages on two ranks; the first embedding and the last layer are one tensor, twice."""

    models = ("transformer",)
    worlds = (2,)

    def build(self) -> nn.Module:
        """This rank's stage."""
        embeddings = nn.Embedding(64, 32)
        return _LastStage(embeddings) if self.rank else _FirstStage(embeddings)

    def wrap(self, net: nn.Module) -> nn.Module:
        """There is no wrapper."""
        return net

    def share(self) -> tuple[int, int]:
        """Both stages work on the same batch."""
        return 0, 1

    def attached(self) -> None:
        """The tied tensor is held by both, all else by one."""
        self.monitor.replicas(f"stage {self.rank}", "final.*" if self.rank else "body.*")
        self.monitor.replicas("tied", "word_embeddings.weight")

    def passes(self) -> None:
        """Forward through both stages and back."""
        inputs, targets = self.next_batch()
        if self.rank == 0:
            activations = self.model(inputs)
            dist.send(activations.detach(), 1)
            gradient = torch.empty_like(activations)
            dist.recv(gradient, 1)
            activations.backward(gradient)
        else:
            activations = torch.empty(BATCH, 32)
            dist.recv(activations, 0)
            activations.requires_grad_()
            loss = self.criterion(self.model(activations), targets)
            loss.backward()
            assert activations.grad is not None
            dist.send(activations.grad, 0)

    def reduce(self) -> None:
        """The tied tensor's gradient is the sum of both."""
        dist.all_reduce(self.parameter("word_embeddings.weight").grad)
