"""Batches as bytes: encoded once by the wire's own encoder, then only their numbers change.

A batch costs some copies of a few hundred bytes instead of an encoding, so that the generator takes
little from the cores it shares with the server. Each is a valid batch of its own: rank, session,
sequence number, steps, times and values are written into it.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rankscope.agent import wire
from rankscope.agent.fingerprint.constants import BUCKETS

LAYER_METRICS = ("grad_norm", "weight_norm", "update_ratio")
STAGES = ("reduced_gradient", "parameters")
# Series that detectors read, in the agent's own names.
_NAMED = (
    "loss",
    "grad_norm",
    "lr",
    "step_seconds",
    "samples_per_second",
    "accuracy",
    "grad_norm_local",
)
# Equal on all ranks.
_SHARED = frozenset({"grad_norm", "lr"})

# Numbers that no batch has, each of the longest form that msgpack knows.
_RANK = 0x7ABBCC01
_SEQ = 0x5EC5_EC5E_5EC5_EC5E
_THROUGH = 0x5A5B_5C5D_5E5F_6061
_FIRST = 0x4142_4344_4546_0000
_LAYER_STEP = 0x3132_3334_3536_0000
_FINGERPRINT_STEP = 0x2122_2324_2526_0000
_SENT_AT = 1.234567890123e18
_SESSION = "#" * 16


@dataclass(frozen=True)
class Shape:
    """What a batch of a rank carries.

    Attributes:
        scalars: series with a value at every step.
        steps: steps a batch.
        layers_every, prints_every: steps between statistics, and fingerprints, of all tensors;
            0 for none. With fingerprints go the whole model's digests, at every step.
    """

    run: str
    ranks: int
    scalars: int
    steps: int
    layers_every: int
    prints_every: int
    tensors: int

    def names(self) -> list[str]:
        """Names of the scalars."""
        own = [f"train/metric_{n}" for n in range(self.scalars - len(_NAMED))]
        return [*_NAMED, *own][: self.scalars]


class Rank:
    """One rank; `next()` is its next batch."""

    def __init__(self, number: int, templates: Templates) -> None:
        self._number = number
        self._templates = templates
        self._session = uuid.uuid4().hex[:16].encode()
        self._seq = 0
        self._step = 0

    def next(self) -> tuple[memoryview, int]:
        """Request, valid until the next call for any rank, and how many points are in it."""
        shape = self._templates.shape
        first, end = self._step, self._step + shape.steps
        layers = _multiples(first, end, shape.layers_every)
        fingerprints = _multiples(first, end, shape.prints_every)
        template = self._templates.get(len(layers), len(fingerprints), hello=self._seq == 0)
        template.fill(self._number, self._session, self._seq, first, layers, fingerprints)
        self._seq += 1
        self._step = end
        return template.request, template.points


class Templates:
    """One template for each kind of batch; see the module."""

    def __init__(self, shape: Shape, host: str) -> None:
        self.shape = shape
        self._host = host
        self._made: dict[tuple[int, int, bool], _Template] = {}
        made = np.random.default_rng(1)
        # Losses and norms come from single precision, times do not.
        self.noise = (1 + 0.1 * made.standard_normal(1 << 16)).astype(np.float32).astype(float)
        self.digests = made.integers(0, 2**64, 1 << 16, dtype=np.uint64)

    def get(self, layers: int, fingerprints: int, *, hello: bool) -> _Template:
        """The template of a batch with numbers of steps with statistics, and with fingerprints."""
        key = (layers, fingerprints, hello)
        if key not in self._made:
            self._made[key] = _Template(self, layers, fingerprints, hello)
        return self._made[key]


class _Template:
    def __init__(self, parent: Templates, layers: int, fingerprints: int, hello: bool) -> None:
        shape = parent.shape
        self._parent, self._shape = parent, shape
        # Places that every value is copied to: known by what is in them, which is random.
        random = np.random.default_rng(2)
        marks: list[tuple[bytes, bool, str]] = []

        def mark(size: tuple[int, ...], shared: bool, kind: str) -> np.ndarray:
            if kind == "word":
                array: np.ndarray = random.integers(0, 2**64, size, dtype=np.uint64)
            else:
                array = random.standard_normal(size)
            marks.append((array.tobytes(), shared, kind))
            return array

        steps = _FIRST + np.arange(shape.steps, dtype=np.int64)
        many = (shape.steps,)
        columns = {
            name: wire.Column(steps, mark(many, name in _SHARED, name)) for name in shape.names()
        }
        digests_of_steps = {}
        if shape.prints_every:
            digests_of_steps["parameters"] = wire.Column(steps, mark(many, True, "word"))
        tensors = shape.tensors
        batch = wire.Batch(
            run=shape.run,
            rank=_RANK,
            session=_SESSION,
            seq=_SEQ,
            world_size=shape.ranks,
            sent_at=_SENT_AT,
            through_step=_THROUGH,
            phase="backward",
            hello=_hello(shape) if hello else None,
            columns=columns,
            words=digests_of_steps,
            layers=tuple(
                wire.Layers(
                    step=_LAYER_STEP + n,
                    table="parameters",
                    metric=metric,
                    values=mark((tensors,), True, metric),
                )
                for n in range(layers)
                for metric in LAYER_METRICS
            ),
            prints=tuple(
                wire.Fingerprint(
                    step=_FINGERPRINT_STEP + n,
                    stage=stage,
                    table="parameters",
                    digests=mark((tensors,), True, "word"),
                    sketches=mark((tensors, BUCKETS), True, "sketch"),
                )
                for n in range(fingerprints)
                for stage in STAGES
            ),
        )
        self.points = batch.points
        body = wire.encode(batch)
        head = (
            f"POST /api/v1/ingest HTTP/1.1\r\nHost: {parent._host}\r\n"
            f"Content-Type: {wire.CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        data = self._data = bytearray(head + body)
        self.request = memoryview(data)
        self._rank = _places(data, b"\xce" + struct.pack(">I", _RANK))
        self._session = _places(data, _SESSION.encode(), before=0)
        self._sent_at = _places(data, b"\xcb" + struct.pack(">d", _SENT_AT))
        self._seq = _places(data, _integer(_SEQ))
        self._through = _places(data, _integer(_THROUGH))
        # Steps are three numbers of a range, or, where they are only one or two, an array.
        self._range = _places(data, _integer(_FIRST), _integer(_FIRST + shape.steps))
        self._steps = _places(data, steps.tobytes(), before=0) if shape.steps < 3 else []
        self._layer_steps = [_places(data, _integer(_LAYER_STEP + n)) for n in range(layers)]
        self._fingerprint_steps = [
            _places(data, _integer(_FINGERPRINT_STEP + n)) for n in range(fingerprints)
        ]
        self._values: list[tuple[int, int, bool, Callable[[int, int], np.ndarray]]] = []
        for n, (found, shared, kind) in enumerate(marks):
            (place,) = _places(data, found, before=0)
            self._values.append((place, n, shared, _maker(parent, kind, len(found) // 8)))

    def fill(
        self, rank: int, session: bytes, seq: int, first: int, layers: range, fingerprints: range
    ) -> None:
        data, steps = self._data, self._shape.steps
        for place in self._rank:
            struct.pack_into(">I", data, place, rank)
        for place in self._session:
            data[place : place + 16] = session
        for place in self._sent_at:
            struct.pack_into(">d", data, place, time.time())
        for place in self._seq:
            struct.pack_into(">Q", data, place, seq)
        for place in self._through:
            struct.pack_into(">Q", data, place, first + steps - 1)
        for n, place in enumerate(self._range):
            struct.pack_into(">Q", data, place, first + steps * (n % 2))
        for place in self._steps:
            struct.pack_into(f"<{steps}q", data, place, *range(first, first + steps))
        for entries, at in ((self._layer_steps, layers), (self._fingerprint_steps, fingerprints)):
            for places, step in zip(entries, at, strict=True):
                for place in places:
                    struct.pack_into(">Q", data, place, step)
        for place, n, shared, make in self._values:
            made = make(first + n * 7919, 0 if shared else rank + 1)
            data[place : place + made.nbytes] = made.data.cast("B")


def _maker(parent: Templates, kind: str, count: int) -> Callable[[int, int], np.ndarray]:
    """A slice of the noise, another one for each place and rank, and the same for the same two."""
    source = parent.digests if kind == "word" else parent.noise
    if kind == "lr":
        source = np.full(len(source), 3e-4)
    if kind == "step_seconds":
        source = 0.1 * np.random.default_rng(3).normal(1, 0.02, len(source))
    room = len(source) - count

    def make(place: int, rank: int) -> np.ndarray:
        at = (place * 31 + rank * 104_729) % room
        return source[at : at + count]

    return make


def _hello(shape: Shape) -> wire.Hello:
    names = tuple(f"layers.{n}.weight" for n in range(shape.tensors))
    table = wire.TensorTable(
        names=names,
        shapes=((64, 64),) * shape.tensors,
        dtypes=("float32",) * shape.tensors,
        shards=("",) * shape.tensors,
    )
    return wire.Hello(
        started_at=time.time(),
        host="load",
        launcher="torchrun",
        wrapper="ddp",
        tables={"parameters": table},
        config={"load": True},
    )


def _multiples(first: int, end: int, every: int) -> range:
    return range(-(-first // every) * every, end, every) if every else range(0)


def _integer(value: int) -> bytes:
    return b"\xcf" + struct.pack(">Q", value)


def _places(data: bytearray, *of: bytes, before: int = 1) -> list[int]:
    """Where the bytes are, ascending, without the byte that says what they are."""
    found = []
    for one in of:
        at = data.find(one)
        if at < 0 and before == 0:
            raise AssertionError("a mark is not in the batch: the wire's form has changed")
        while at >= 0:
            found.append(at + before)
            at = data.find(one, at + 1)
    return sorted(found)
