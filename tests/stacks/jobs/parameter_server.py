"""A synchronous parameter server over reduce and broadcast."""

from tests.lab.faults.case import Expected
from tests.lab.faults.local_sgd import ParameterServer
from tests.stacks.faults import begin, cases

LAUNCH = "torchrun"
WORLD = 4
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class _Worker:
    """The suspect one is never the server itself."""

    onset = 30

    @property
    def worker(self):
        return max(self.suspects, 1)

    def named(self):
        return (frozenset({self.worker}),)


class NeverPulls(_Worker):
    """A worker that goes on with old weights."""

    id = "never-pulls"
    what = "from one step on one worker does not pull the weights"

    def pulls(self):
        return not (self.rank == self.worker and self.step >= self.at)

    def expected(self):
        return Expected(
            kinds=("desync.parameters", "desync.progress"), ranks=self.named(), step=self.at
        )


class WrongPull(_Worker):
    """A worker that receives a damaged tensor."""

    id = "wrong-pull"
    what = "at one step one worker's copy of a tensor is damaged on the way"

    def weights(self):
        if self.rank == self.worker and self.step == self.at:
            self.parameter(self.tensor).data.view(-1)[3] += 0.125
        return super().weights()

    def expected(self):
        return Expected(
            kinds=("desync.parameters",),
            ranks=self.named(),
            tensors=frozenset({self.tensor}),
            step=self.at,
        )


class Nan(_Worker):
    """A worker whose loss is no number."""

    id = "nan"
    what = "from one step on one worker's loss is NaN"

    def forward(self, batch):
        loss = super().forward(batch)
        return loss * float("nan") if self.rank == self.worker and self.step >= self.at else loss

    def expected(self):
        return Expected(kinds=("loss.nonfinite",), ranks=self.named(), step=self.at)


CASES = cases(ParameterServer, NeverPulls, WrongPull, Nan)
