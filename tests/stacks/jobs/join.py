"""DDP under `Join`: one rank has more batches than the other."""

from torch.distributed.algorithms.join import Join

from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Uneven(Training):
    """Rank 0 ends ten steps before rank 1, and answers its collectives."""

    @property
    def length(self):
        return super().length - (0 if self.rank else 10)

    def train(self):
        self.prepare()
        self.monitor = self.attach()
        with self.monitor, Join([self.model]):
            while self.step < self.length:
                self.one_step()
                self.step += 1


CASES = cases(Uneven, Flip, OwnGradient, OwnRate)
