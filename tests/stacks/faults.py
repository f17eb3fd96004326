"""What every torch stack's job is broken by: mixed into its healthy trainer, before it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from tests.lab.faults.case import Expected
from tests.lab.faults.hardware import flip
from tests.lab.faults.training import Training, sample_all
from tests.stacks.options import agent_options


def begin() -> int:
    """Joins the group that torchrun's variables describe."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank()


class Inside(Training):
    """A model that is `net` inside a module of its framework, which wraps it."""

    def wrap(self, net: torch.nn.Module) -> torch.nn.Module:
        return net

    @property
    def tensor(self) -> str:
        return f"net.{super().tensor}"

    def parameter(self, name: str) -> torch.nn.Parameter:
        return super().parameter(name.removeprefix("net."))

    def options(self) -> dict[str, Any]:
        """The options that every case gives the agent."""
        return agent_options(self.setting)


class Prepared(ABC, Training):
    """A framework wraps model and optimizer itself, and has an integration of its own."""

    def wrap(self, net: torch.nn.Module) -> torch.nn.Module:
        return net

    @abstractmethod
    def watch(self, **options: Any) -> Any:
        """Attaches as users of the framework do."""

    def attach(self, **options: Any) -> Any:
        monitor = self.watch(**agent_options(self.setting), **options)
        sample_all(monitor, self.setting)
        return monitor


class Healthy:
    """Nothing is broken."""

    id = "healthy"
    what = "a plain training"
    steps = 60

    def expected(self) -> Expected:
        return Expected()


class Flip:
    """A bit of one rank's weights flips between two steps."""

    id = "flip"
    what = "one bit of one weight of one rank flips between two steps"

    def before_step(self: Any) -> None:
        if self.is_target and self.step == self.at:
            flip(self.parameter(self.tensor), 7 * self.at)
        super().before_step()

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            stages=("outside_optimizer", "parameters"),
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )


class OwnGradient:
    """One rank changes a gradient between the reduction and the step."""

    id = "own-gradient"
    what = "at one step one rank applies half of one tensor's gradient"

    def clip(self: Any) -> None:
        super().clip()
        if self.is_target and self.step == self.at:
            gradient = self.parameter(self.tensor).grad
            gradient *= 0.5

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=("reduced_gradient", "clipped_gradient"),
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )


class OwnRate:
    """One rank's learning rate is another from a step on."""

    id = "own-rate"
    what = "from one step on one rank's learning rate is half of the others'"

    def before_step(self: Any) -> None:
        if self.is_target and self.step == self.at:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        super().before_step()

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.hyperparameters",),
            stages=("hyperparameters",),
            ranks=self.odd_one(),
            step=self.at,
        )


class SameData:
    """All ranks read the same batches."""

    id = "same-data"
    what = "all ranks read the same batches"
    onset = 0

    def share(self: Any) -> tuple[int, int]:
        return 0, self.world

    def expected(self: Any) -> Expected:
        return Expected(kinds=("data.duplicated",), ranks=self.everybody())


class SmallBatches:
    """One rank's batches are smaller, and count as much."""

    id = "small-batches"
    what = "one rank's batches have 2 samples, the others' 16"
    onset = 0

    def batch(self: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return (inputs[:2], targets[:2]) if self.is_target else (inputs, targets)

    def expected(self: Any) -> Expected:
        return Expected(kinds=("data.imbalanced",), ranks=self.one(), tolerance=8)


class NotANumber:
    """One rank's loss is no number at one step."""

    id = "nan"
    what = "at one step one rank's inputs hold a NaN"

    def batch(self: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if self.is_target and self.step == self.at:
            inputs = inputs.clone()
            inputs[0, 0] = torch.nan
        return inputs, targets

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("loss.nonfinite", "gradient.nonfinite"),
            ranks=self.one(),
            step=self.at,
        )


class BadLabels:
    """One rank's labels do not belong to its inputs."""

    id = "bad-labels"
    what = "from one step on one rank's labels are shuffled"
    steps = 200
    onset = 100

    def batch(self: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if self.is_target and self.step >= self.at:
            targets = targets[torch.randperm(len(targets))]
        return inputs, targets

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("rank.loss_outlier", "data.outlier", "rank.gradient_outlier"),
            ranks=self.odd_one(),
            step=self.at,
            tolerance=50,
        )


class SlowRank:
    """One rank takes longer to compute: what comes before the forward pass is its loader's."""

    id = "slow-rank"
    what = "from one step on one rank's forward pass takes 250 ms longer"
    steps = 120
    onset = 50

    def forward(self: Any, batch: Any) -> torch.Tensor:
        loss = super().forward(batch)
        if self.is_target and self.step >= self.at:
            time.sleep(0.25)
        return loss

    def expected(self: Any) -> Expected:
        return Expected(kinds=("rank.straggler",), ranks=self.one(), step=self.at, tolerance=20)


class OwnStart:
    """Every rank draws its own first weights."""

    id = "own-start"
    what = "every rank draws its own first weights and nobody broadcasts"
    onset = 0

    def first_seed(self: Any) -> int:
        return 1000 + 100 * self.rank + self.seed

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.parameters",), stages=("start",), ranks=self.all(), severity="critical"
        )


def cases(trainer: type, *faults: type) -> list[type]:
    """The healthy trainer, and one broken by each fault."""
    return [type(f"{f.__name__}{trainer.__name__}", (f, trainer), {}) for f in (Healthy, *faults)]
