"""DeepSpeed's engine around the lab's trainer, at any stage of ZeRO."""

from __future__ import annotations

import os
from typing import Any, ClassVar

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

from rankscope import agent
from tests.lab.faults.case import Expected
from tests.lab.faults.hardware import flip
from tests.stacks import faults


def begin() -> int:
    """Joins the group, as DeepSpeed wants it."""
    rank = faults.begin()
    # Else an extension is built, for minutes, that passes gradients through shared memory.
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
    deepspeed.init_distributed("gloo")
    return rank


class Engine(faults.Prepared):
    """Backward and step are the engine's; AdamW.

    Attributes:
        stage: of ZeRO.
        more: settings of it.
    """

    stage: ClassVar[int]
    more: ClassVar[dict[str, Any]] = {}

    def prepared(self) -> None:
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=self.net,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": 16,
                "zero_optimization": {"stage": self.stage, **self.more},
                "steps_per_print": 10**9,
            },
        )

    def watch(self, **options: Any) -> Any:
        return agent.deepspeed.attach(self.model, **options)

    def one_step(self) -> None:
        self.before_step()
        self.model.backward(self.forward(self.next_batch()))
        self.model.step()


class WrongGather:
    """A part arrives damaged."""

    id = "wrong-gather"
    what = "at one step one rank's copy of a tensor is damaged when the parts are gathered"

    def prepared(self: Any) -> None:
        super().prepared()
        step = self.optimizer.step

        def damaging() -> None:
            step()
            if self.is_target and self.step == self.at:
                flip(self.parameter(self.tensor), 7 * self.at)

        self.optimizer.step = damaging

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )


def partitioned(trainer: type) -> list[type]:
    """Cases of a stage whose parameters are held whole by every rank."""
    return faults.cases(trainer, WrongGather, faults.OwnRate, faults.SameData, faults.NotANumber)
