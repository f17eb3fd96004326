"""DeepSpeed: ZeRO 2, gradients and optimizer in parts; AdamW."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from stacks import faults
from stacks.faults import NotANumber, OwnRate, SameData, cases

from benchmarks.faultlab.case import Expected
from benchmarks.faultlab.hardware import flip
from benchmarks.faultlab.training import Training, sample_all
from rankscope import agent

LAUNCH = "torchrun"
WORLD = 2
NEEDS = ("deepspeed", "torch")


def begin():
    rank = faults.begin()
    # Else an extension is built, for minutes, that passes gradients through shared memory.
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
    deepspeed.init_distributed("gloo")
    return rank


class Engine(Training):
    """Backward and step are the engine's."""

    stage = 2

    def wrap(self, net):
        return net

    def prepared(self):
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=self.net,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": 16,
                "zero_optimization": {"stage": self.stage},
                "steps_per_print": 10**9,
            },
        )

    def attach(self):
        setting = self.setting
        options = {"overhead": 1.0} if setting.full else {}
        monitor = agent.deepspeed.attach(
            self.model, server=setting.server, run=setting.run, project="stacks", **options
        )
        sample_all(monitor, setting)
        return monitor

    def one_step(self):
        self.before_step()
        self.model.backward(self.forward(self.next_batch()))
        self.model.step()


class WrongGather:
    """A part arrives damaged."""

    id = "wrong-gather"
    what = "at one step one rank's copy of a tensor is damaged when the parts are gathered"

    def prepared(self):
        super().prepared()
        step = self.optimizer.step

        def damaging():
            step()
            if self.is_guilty and self.step == self.at:
                flip(self.parameter(self.tensor), 7 * self.at)

        self.optimizer.step = damaging

    def expected(self):
        return Expected(
            kinds=("desync.parameters",),
            ranks=self.odd_one(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )


CASES = cases(Engine, WrongGather, OwnRate, SameData, NotANumber)
