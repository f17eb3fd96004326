"""HSDP: two replicas of two shards each."""

from torch.distributed.tensor import DTensor

from tests.lab.faults.case import Expected
from tests.lab.faults.sharded import Sharded
from tests.stacks.faults import Flip, OwnRate, SameData, begin, cases

LAUNCH = "torchrun"
WORLD = 4
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Hybrid(Sharded):
    """On a 2x2 mesh; ranks {0, 2} and {1, 3} hold the same shards."""

    replicated = True

    def peers(self):
        """The suspect rank and its replica: of two nobody can know which one is wrong."""
        pair = frozenset({self.suspects, (self.suspects + 2) % 4})
        return (frozenset({self.suspects}), pair)


class ShardFlip(Flip):
    """In a shard."""

    def parameter(self, name):
        held = super().parameter(name)
        return held.to_local() if isinstance(held, DTensor) else held

    def odd_one(self):
        return self.peers()


class OwnStarts:
    """`fully_shard` does not broadcast."""

    id = "own-start"
    what = "every rank draws its own first weights"
    onset = 0

    def first_seed(self):
        return 1000 + 100 * self.rank + self.seed

    def expected(self):
        return Expected(
            kinds=("desync.parameters",), stages=("start",), ranks=self.all(), severity="critical"
        )


CASES = cases(Hybrid, OwnStarts, ShardFlip, OwnRate, SameData)
