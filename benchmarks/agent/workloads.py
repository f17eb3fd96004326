"""What is trained: three kinds of models, with a batch that makes the step as long as asked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    Attributes:
        size: width of the model; the batch is fitted to `step_ms`, the width is not.
        seconds: how long it is measured in the full run.
    """

    name: str
    kind: str
    step_ms: float
    size: int
    seconds: float


WORKLOADS = (
    Workload("MLP, 1 ms", "mlp", 1.0, 32, 45.0),
    Workload("MLP, 10 ms", "mlp", 10.0, 512, 40.0),
    Workload("CNN with BatchNorm, 10 ms", "cnn", 10.0, 8, 25.0),
    Workload("transformer, 10 ms", "transformer", 10.0, 16, 25.0),
    Workload("transformer, 40 ms", "transformer", 40.0, 64, 30.0),
)


def mlp(size: int) -> nn.Module:
    """10 tensors."""
    layers: list[nn.Module] = [nn.Linear(64, size)]
    for _ in range(3):
        layers += [nn.ReLU(), nn.Linear(size, size)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(size, 10))


def cnn(size: int) -> nn.Module:
    """59 tensors: 19 convolutions without bias, each with a BatchNorm, and a head."""
    layers: list[nn.Module] = []
    before = 3
    for depth in range(19):
        layers += [
            nn.Conv2d(before, size, 3, padding=1, stride=2 if depth == 6 else 1, bias=False),
            nn.BatchNorm2d(size),
            nn.ReLU(),
        ]
        before = size
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, 10))


class Transformer(nn.Module):
    """148 tensors: 12 encoder layers of 12 tensors, an embedding, positions, and a head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, size)
        self.positions = nn.Parameter(torch.zeros(8, size))
        layer = nn.TransformerEncoderLayer(size, 2, 2 * size, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(size, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores [batch, 10] of tokens [batch, 8]."""
        return self.head(self.layers(self.embedding(tokens) + self.positions).mean(dim=1))


# Parts of a step, in their order.
PHASES = ("zero_grad", "forward", "loss", "backward", "optimizer")
_KINDS = {"mlp": mlp, "cnn": cnn, "transformer": Transformer}


def inputs(kind: str, batch: int) -> torch.Tensor:
    """A batch of random samples."""
    if kind == "mlp":
        return torch.randn(batch, 64)
    if kind == "cnn":
        return torch.randn(batch, 3, 8, 8)
    return torch.randint(0, 64, (batch, 8))


class Trainer:
    """A model, its optimizer and a batch; a step is what a plain trainer does.

    Attributes:
        tensors: number of parameters.
    """

    def __init__(self, workload: Workload, batch: int) -> None:
        torch.manual_seed(0)
        inner = _KINDS[workload.kind](workload.size)
        self.model = DistributedDataParallel(inner)
        self.tensors = len(list(inner.parameters()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-5, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss()
        self.renew(workload, batch)

    def renew(self, workload: Workload, batch: int) -> None:
        """Trains on another batch from now on."""
        self.x = inputs(workload.kind, batch)
        self.y = torch.randint(0, 10, (batch,))

    def step(self) -> torch.Tensor:
        """One training step; its loss."""
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss

    def step_in_phases(self, clock: Callable[[], int]) -> tuple[int, ...]:
        """The same step; what the clock says when it begins and after each of `PHASES`."""
        began = clock()
        self.optimizer.zero_grad()
        cleared = clock()
        scores = self.model(self.x)
        forward = clock()
        loss = self.criterion(scores, self.y)
        compared = clock()
        loss.backward()
        backward = clock()
        self.optimizer.step()
        return began, cleared, forward, compared, backward, clock()


def fitted_batch(workload: Workload) -> int:
    """The batch with which a step takes about as long as the workload says, on this machine.

    All ranks call it together; rank 0 measures and decides.
    """
    batch = 8
    trainer = Trainer(workload, batch)
    for _ in range(6):
        trainer.renew(workload, batch)
        count = max(8, min(60, int(150 / workload.step_ms)))
        times = []
        for _ in range(count):
            began = time.perf_counter()
            trainer.step()
            times.append(1e3 * (time.perf_counter() - began))
        # The rest of a step does not grow with the batch: half the correction in the logarithm
        # would be too little, the whole of it too much, so it is done again.
        wanted = batch * workload.step_ms / statistics.median(times[count // 4 :])
        wanted = min(max(wanted, batch / 4, 1), 4 * batch + 1, 65536)
        chosen: list[Any] = [round(wanted)]
        dist.broadcast_object_list(chosen, src=0)
        if abs(chosen[0] - batch) <= 0.05 * batch:
            break
        batch = chosen[0]
    return batch
