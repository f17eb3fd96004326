"""Accelerate: a loop of one's own under `accumulate`, two micro-batches a step."""

from accelerate import Accelerator

from rankscope import agent
from tests.stacks.faults import Flip, OwnGradient, OwnRate, Prepared, SameData, begin, cases

LAUNCH = "torchrun"
WORLD = 2
NEEDS = ("accelerate", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Accelerated(Prepared):
    """`prepare` wraps the model in DDP and the optimizer in one of Accelerate's own."""

    def prepared(self):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def watch(self, **options):
        return agent.accelerate.attach(self.accelerator, **options)

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
