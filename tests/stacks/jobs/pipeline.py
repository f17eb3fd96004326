"""A pipeline of two stages (GPipe, four micro-batches), twice: stages are data-parallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, begin, cases

LAUNCH = "torchrun"
WORLD = 4
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Stages(Training):
    """Ranks {0, 1} are one pipeline, {2, 3} the other."""

    def prepare(self):
        self.part, self.pair = self.rank % 2, self.rank // 2
        pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.pipe, self.column = pipes[self.pair], columns[self.part]
        super().prepare()

    def build(self):
        whole = super().build()
        if self.part == 0:
            return nn.Sequential(whole.inner, whole.norm, nn.ReLU())
        return nn.Sequential(
            nn.Identity(), nn.Identity(), nn.Identity(), whole.hidden, nn.ReLU(), whole.head
        )

    def wrap(self, net):
        stage = PipelineStage(net, self.part, 2, torch.device("cpu"), group=self.pipe)
        self.schedule = ScheduleGPipe(stage, 4, loss_fn=self.criterion)
        return net

    def share(self):
        return self.pair, 2

    def passes(self):
        inputs, targets = self.next_batch()
        if self.part == 0:
            self.schedule.step(inputs)
        else:
            losses = []
            self.schedule.step(target=targets, losses=losses)
            self.monitor.log(loss=float(torch.stack(losses).mean()))

    def reduce(self):
        for parameter in self.net.parameters():
            dist.all_reduce(parameter.grad, group=self.column)
            parameter.grad /= 2

    @property
    def tensor(self):
        return "3.weight" if self.suspects % 2 else "0.weight"

    def odd_one(self):
        """Of two replicas nobody can know which one is wrong."""
        return (frozenset({self.suspects}), frozenset({self.suspects, (self.suspects + 2) % 4}))


class Rate(OwnRate):
    """Learning rates are the same on all stages: here one of four is the odd one."""

    def odd_one(self):
        return (frozenset({self.suspects}), frozenset({self.suspects, (self.suspects + 2) % 4}))


CASES = cases(Stages, Flip, OwnGradient, Rate)
