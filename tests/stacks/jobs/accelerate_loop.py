"""Accelerate: a loop of one's own under `accumulate`, two micro-batches a step."""

from accelerate import Accelerator
from stacks.faults import Flip, OwnGradient, OwnRate, SameData, begin, cases

from benchmarks.faultlab.training import Training, sample_all
from rankscope import agent

LAUNCH = "torchrun"
WORLD = 2
NEEDS = ("accelerate", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Accelerated(Training):
    """`prepare` wraps the model in DDP and the optimizer in one of Accelerate's own."""

    def wrap(self, net):
        return net

    def prepared(self):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def attach(self):
        setting = self.setting
        options = {"overhead": 1.0} if setting.full else {}
        monitor = agent.accelerate.attach(
            self.accelerator, server=setting.server, run=setting.run, project="stacks", **options
        )
        sample_all(monitor, setting)
        return monitor

    def one_step(self):
        self.before_step()
        for _ in range(2):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.forward(self.next_batch()))
                if self.accelerator.sync_gradients:
                    self.clip()
                self.optimizer.step()
                self.optimizer.zero_grad()


CASES = cases(Accelerated, Flip, OwnGradient, OwnRate, SameData)
