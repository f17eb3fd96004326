"""DDP with gradient accumulation: all micro-batches but the last under `no_sync`."""

from tests.lab.faults.case import Expected
from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Accumulating(Training):
    """Two micro-batches a step."""

    def passes(self) -> None:
        with self.model.no_sync():
            self.backward(self.forward(self.next_batch()) / 2)
        self.backward(self.forward(self.next_batch()) / 2)


class NeverSynced:
    """The last micro-batch runs under `no_sync`, too."""

    id = "never-synced"
    what = "from one step on the last micro-batch runs under `no_sync`, too"

    def passes(self) -> None:
        if self.step < self.at:
            return super().passes()
        with self.model.no_sync():
            self.backward(self.forward(self.next_batch()) / 2)
            self.backward(self.forward(self.next_batch()) / 2)

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.gradients",),
            stages=("reduced_gradient",),
            ranks=self.all(),
            step=self.at,
            severity="critical",
        )


CASES = cases(Accumulating, NeverSynced, Flip, OwnGradient, OwnRate)
