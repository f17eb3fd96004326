"""Digests and sketches of a fixed list of tensors, with everything that can be prepared prepared.

Digest of a tensor with words w (its bytes in logical order as little-endian signed integers of 32
bits, the last one filled up with zeros):

    D = sum_b q_b * sum_j w[b, j] * r_j   (mod 2^64)

over rows b of 512 words, with random 32-bit numbers r and odd 64-bit ones q (multilinear hashing,
Lemire & Kaser 2014, "Strongly universal string hashing is fast", in two levels). Integer sums
commute, so D depends neither on threads nor on blocks nor on the device. A change of one word by d
changes its row's sum by d * r_j, which is below 2^63 and not zero, and the odd q_b keeps it so: no
change of one word is lost. A change of several is lost with a probability of about 2^-31 when they
are in one row, 2^-33 when they are in several (the flipped sign bits being the worst of them).

Sketch of a tensor x with 64 buckets, summed in float64, so that a change of one unit in the last
place of one element is not lost:

    s_k = sum of sign_i * x_i over all i of bucket k

It is linear, and E |s(x) - s(y)|^2 = |x - y|^2 with a relative variance of at most 2 / 64 where no
bucket has more than its share (AMS sketch, Alon, Matias & Szegedy 1996, in the bucketed form of
CountSketch, Charikar, Chen & Farach-Colton 2002). Element j of block b (of 512) is in bucket

    (8 * ((j // 8 + j // 64) mod 8) + j mod 8 + 27 * b) mod 64

and its sign is a bit of r_j, another one of 32 from block to block, times a sign of the block: with
the same signs for each block, differences of low rank (every gradient of a linear layer is one)
would project onto the same few numbers and their size would be misjudged. Buckets that turn from
block to block share out columns of matrices, whatever the length of their rows. (Within one block
they are turned by eights only: a difference of rank one of a matrix with 64 rows of 8 is known to
12 %, not to 9 %.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from rankscope.agent.fingerprint.constants import BUCKETS, tensor_key
from rankscope.agent.fingerprint.device import DeviceRun, DeviceTensors, OpenRun
from rankscope.agent.fingerprint.host import HostTensors
from rankscope.agent.wire import Float64, UInt64

_dtype, _device = attrgetter("dtype"), attrgetter("device")
_is_cpu = attrgetter("is_cpu")


@dataclass(frozen=True, slots=True)
class FingerprintValues:
    """Fingerprints of the tensors of a plan at one moment.

    Attributes:
        digests: uint64 [T].
        sketches: float64 [T, BUCKETS], or None where they were not asked for.
        squares: sums of squares, float64 [T]; None where they were not asked for.
    """

    digests: UInt64
    sketches: Float64 | None
    squares: Float64 | None = None


class Pending:
    """Fingerprints that may still be under way. To be used by one thread at a time.

    Attributes:
        squares: those of the result, where they are there at once: of tensors on the host.
    """

    def __init__(self, fingerprints: FingerprintValues, runs: list[DeviceRun]) -> None:
        self.squares = None if runs else fingerprints.squares
        self._fingerprints = fingerprints
        self._runs = runs

    def ready(self) -> bool:
        """Whether `result` would return at once; never waits."""
        return all(run.ready() for run in self._runs)

    def result(self) -> FingerprintValues:
        """The fingerprints; waits for the devices where they have not arrived."""
        for run in self._runs:
            found = self._fingerprints
            run.write(found.digests, found.sketches, found.squares)
        self._runs = []
        return self._fingerprints


class OpenSketches:
    """Sketches to which the tensors of a plan are given one by one.

    Args:
        rows: positions in the plan of those that are on the device.
        count: of the tensors of the plan.
    """

    def __init__(self, run: OpenRun, rows: Sequence[int], count: int) -> None:
        self._run = run
        self._places = {row: place for place, row in enumerate(rows)}
        self._count = count

    def add(self, index: int, tensor: torch.Tensor) -> None:
        """Takes the sketch of one tensor as it is now; waits for nothing.

        Args:
            index: its position in the plan; each at most once.
            tensor: of the size, type and device of the plan's. An empty one counts as zeros.
        """
        if index in self._places:
            self._run.add(self._places[index], tensor)

    def close(self) -> Pending:
        """All have been given: what was found, with zeros for those that were not."""
        digests = np.zeros(self._count, dtype=np.uint64)
        sketches, squares = np.zeros((self._count, BUCKETS)), np.zeros(self._count)
        return Pending(FingerprintValues(digests, sketches, squares), [self._run.close()])


class FingerprintPlan:
    """Fingerprints of one list of tensors, again and again.

    Sizes, dtypes and devices are those given at construction; a list that has changed needs a new
    plan. The tensors may be on several devices.

    Attributes:
        names: one a tensor.
        on_host: whether all tensors are: then results are there at once.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self.names = tuple(names)
        self._sizes = list(map(torch.Tensor.numel, tensors))
        self._dtypes = list(map(_dtype, tensors))
        self._devices = list(map(_device, tensors))
        self._keys = np.array([tensor_key(n) for n in names], dtype=np.uint64)
        places: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                places.setdefault(tensor.device, []).append(index)
        self._host: HostTensors | None = None
        self._elsewhere: list[DeviceTensors] = []
        for device, rows in places.items():
            if device.type == "cpu":
                self._host = HostTensors(rows, [tensors[row] for row in rows])
            else:
                self._elsewhere.append(DeviceTensors(rows, tensors, device))
        self.on_host = not self._elsewhere
        self._all_on_cpu = all(map(_is_cpu, tensors))

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors still have the sizes, dtypes and devices of the plan."""
        # Loops that are not Python's: this is asked of all parameters, and at many samples.
        return (
            list(map(torch.Tensor.numel, tensors)) == self._sizes
            and list(map(_dtype, tensors)) == self._dtypes
            and (
                all(map(_is_cpu, tensors))
                if self._all_on_cpu
                else list(map(_device, tensors)) == self._devices
            )
        )

    def model_digest(self, digests: UInt64) -> int:
        """One digest for all tensors together."""
        return int((digests * self._keys).sum(dtype=np.uint64))

    def begin(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        sketches: bool,
        digests: bool = True,
        squares: bool = False,
    ) -> Pending:
        """Fingerprints of the tensors as they are now; waits for no device.

        On CUDA "now" is a point of the current stream: later operations of that stream may change
        the tensors. On the CPU the result is ready on return.

        Args:
            tensors: those of the plan.
            sketches: whether sketches are wanted.
            digests: whether digests are; without, they may be 0.
            squares: whether sums of squares are; on a device they come with the sketches.
        """
        digested = np.zeros(len(self.names), dtype=np.uint64)
        sketched = np.zeros((len(self.names), BUCKETS)) if sketches else None
        squared = np.zeros(len(self.names)) if squares else None
        # Devices first: they work while the host does its part.
        runs = [
            part.begin(tensors, sketches=sketches or squares, digests=digests)
            for part in self._elsewhere
        ]
        if self._host is not None:
            self._host.compute(tensors, digested if digests else None, sketched, squared)
        return Pending(FingerprintValues(digested, sketched, squared), runs)

    def open(self) -> OpenSketches:
        """Sketches and sums of squares of the tensors one by one, as they come.

        Only where all of them are on one device that is not the host. Nothing else of the plan is
        begun or opened before it is closed.
        """
        (part,) = self._elsewhere
        assert self._host is None
        return OpenSketches(part.open(), part.rows, len(self.names))

    def compute(self, tensors: Sequence[torch.Tensor], *, sketches: bool) -> FingerprintValues:
        """Fingerprints of the tensors as they are now; waits for the devices they are on."""
        return self.begin(tensors, sketches=sketches).result()


def digest_of(tensor: torch.Tensor) -> int:
    """The digest that the agent sends of such a tensor: of its bits, in logical order.

    Waits for the device that it is on.
    """
    plan = FingerprintPlan(("",), (tensor,))
    return int(plan.compute((tensor,), sketches=False).digests[0])
