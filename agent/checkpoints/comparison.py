"""Checkpoints compared: which tensors and values differ, are missing, or are of another shape."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rankscope.agent.checkpoints import elements
from rankscope.agent.checkpoints.elements import ElementDifference
from rankscope.agent.checkpoints.errors import DAMAGED, Unreadable, told
from rankscope.agent.checkpoints.source import Source, StoredTensor
from rankscope.agent.checkpoints.steps import stated
from rankscope.agent.fingerprint.plan import digest_of
from rankscope.agent.model.state_names import aligned

MISSING, EXTRA, SHAPE, DTYPE, TYPE, ELEMENTS, VALUE = (
    *("missing", "extra", "shape", "dtype", "type", "elements", "value"),
)
_LONGEST = 60


@dataclass(frozen=True, slots=True)
class Difference:
    """One name that is not the same in a checkpoint as in the one it is compared with.

    Attributes:
        name: dotted name, without what wrappers put into it where they differ.
        kind: `missing` (the checkpoint does not have it), `extra` (the reference does not),
            `shape`, `dtype`, `type` (a tensor here, a value there), `elements`, or `value`.
        checkpoint: place of the checkpoint among those compared.
        reference: place of the one it is compared with.
        there: what it is in the reference and in the checkpoint, in words.
        elements: of kind `elements`, how they differ.
        note: what more there is to say, or empty.
    """

    name: str
    kind: str
    checkpoint: int
    reference: int
    there: tuple[str, str]
    elements: ElementDifference | None = None
    note: str = ""


@dataclass(slots=True)
class Compared:
    """What became of one group of checkpoints.

    Attributes:
        labels: of the checkpoints.
        formats: how each is stored.
        steps: of each, counter -> least and greatest step.
        differences: in the order of the names.
        digests: tensor -> the digest of each checkpoint; None where it does not have the tensor.
        values: number of values that were compared.
        octets: size of the tensors of the first checkpoint that were compared.
        renamed: number of names that are equal but for what wrappers put into them.
        unread: name -> why it could not be compared.
    """

    labels: tuple[str, ...]
    formats: tuple[str, ...] = ()
    steps: tuple[dict[str, tuple[int, int]], ...] = ()
    differences: list[Difference] = field(default_factory=list)
    digests: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    values: int = 0
    octets: int = 0
    renamed: int = 0
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def differing(self) -> list[int]:
        """In how many names each checkpoint differs from most of them; of two, from the first."""
        counted = Counter(d.checkpoint for d in self.differences)
        return [counted[place] for place in range(len(self.labels))]

    @property
    def differing_tensors(self) -> int:
        """Number of tensors that are not the same in all."""
        return len({d.name for d in self.differences if d.name in self.digests})

    @property
    def differing_values(self) -> int:
        """The same of values."""
        return len({d.name for d in self.differences if d.name not in self.digests})

    @property
    def suspects(self) -> list[str]:
        """Those of several replicas that differ where most of them agree; none of two."""
        if len(self.labels) < 3:
            return []
        found = [b for b, n in zip(self.labels, self.differing, strict=True) if n]
        return found if 2 * len(found) < len(self.labels) else []


def compare(labels: Sequence[str], sources: Sequence[Source]) -> Compared:
    """Two checkpoints, or replicas of any number, name by name.

    Of more than two, each name's reference is one of those that most of them agree with; of two it
    is the first. A tensor that cannot be read is none of the differences: it is among the unread.
    """
    done = Compared(
        tuple(labels),
        tuple(source.format for source in sources),
        tuple(stated(source) for source in sources),
    )
    for name, own in aligned([source.names for source in sources]):
        done.renamed += len({o for o in own if o is not None}) > 1
        for source, label, called in zip(sources, labels, own, strict=True):
            if called in source.unread:
                done.unread[f"{name} of {label}"] = source.unread[called]
        if any(o in source.unread for source, o in zip(sources, own, strict=True)):
            continue
        if any(source.digests_alone for source in sources) and any(
            o in source.values for source, o in zip(sources, own, strict=True)
        ):
            continue
        try:
            done.differences += _of_name(name, own, sources, done)
        except (Unreadable, *DAMAGED) as error:
            # Tensors are read here: a file may be gone by now, or a tensor larger than the memory.
            done.unread[name] = told(error)
    return done


def _of_name(
    name: str, own: Sequence[str | None], sources: Sequence[Source], done: Compared
) -> list[Difference]:
    held = [_Held(source, called) for source, called in zip(sources, own, strict=True)]
    reference = 0
    if len(held) > 2:
        most, _ = Counter(one.key for one in held).most_common(1)[0]
        reference = next(place for place, one in enumerate(held) if one.key == most)
    found = [
        _difference(name, held[reference], one, (place, reference))
        for place, one in enumerate(held)
        if one.key != held[reference].key
    ]
    # Counted once nothing of it can fail any more.
    if any(one.tensor for one in held):
        done.digests[name] = tuple(one.digest for one in held)
    if any(one.is_value for one in held):
        done.values += 1
    if held[0].tensor is not None:
        done.octets += held[0].tensor.bytes
    return found


class _Held:
    """What one checkpoint has under a name.

    Attributes:
        tensor: None where it is none.
        digest: of its bits.
        value: of what is no tensor.
        is_value: whether there is such.
        file: that has the value, of several.
        key: equal where checkpoints hold the same.
    """

    def __init__(self, source: Source, name: str | None) -> None:
        self.tensor: StoredTensor | None = None
        self.digest: int | None = None
        self.value: Any = None
        self.is_value = False
        self.file = ""
        self.key: Hashable = None
        if name is None:
            return
        if (tensor := source.tensors.get(name)) is not None:
            self.tensor = tensor
            self.digest = digest_of(tensor.read()) if tensor.digest is None else tensor.digest
            self.key = (tensor.shape, tensor.dtype, self.digest)
            return
        self.value, self.is_value = source.values[name], True
        self.file = source.value_files.get(name, "")
        self.key = _key(self.value)

    @property
    def text(self) -> str:
        """What it is."""
        if self.tensor is not None:
            return f"{self.tensor.dtype} {list(self.tensor.shape)}"
        if not self.is_value:
            return "not there"
        shown = repr(self.value)
        return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


def _key(value: Any) -> Hashable:
    """Equal for values that are the same, as bits of floats are."""
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, set | frozenset):
        return (type(value).__name__, tuple(sorted(map(repr, value))))
    return (type(value).__name__, repr(value))


def _difference(name: str, reference: _Held, other: _Held, places: tuple[int, int]) -> Difference:
    def made(kind: str, **more: Any) -> Difference:
        return Difference(name, kind, *places, (reference.text, other.text), **more)

    if other.key is None:
        return made(MISSING)
    if reference.key is None:
        return made(EXTRA)
    if reference.tensor is None or other.tensor is None:
        kind = VALUE if reference.is_value and other.is_value else TYPE
        files = dict.fromkeys(one.file for one in (reference, other) if one.file)
        return made(kind, note=f"in {' and '.join(files)}" if files else "")
    if reference.tensor.shape != other.tensor.shape:
        return made(SHAPE)
    if reference.tensor.dtype != other.tensor.dtype and _digests_alone(reference, other):
        return made(DTYPE)
    if _digests_alone(reference, other):
        return made(ELEMENTS, note="their digests differ; of one the digest alone is kept")
    a, b = reference.tensor.read(), other.tensor.read()
    if a.dtype != b.dtype:
        return made(DTYPE, note=_converted(a, b))
    parts = (reference.tensor.parts, other.tensor.parts)
    try:
        found = elements.compare(a, b, parts)
    except DAMAGED as error:
        # Of some types torch knows the bits alone. That these differ is known.
        return made(ELEMENTS, note=f"their bits differ, their values {told(error)}")
    if found is None:
        raise Unreadable(f"{name}: it changes while it is read; is it being saved?")
    return made(ELEMENTS, elements=found)


def _digests_alone(*held: _Held) -> bool:
    return any(one.tensor is not None and one.tensor.digest is not None for one in held)


def _converted(a: torch.Tensor, b: torch.Tensor) -> str:
    """What there is to say of the values of two tensors of different types."""
    here, there = (str(t.dtype).removeprefix("torch.") for t in (a, b))
    for this, that, text in ((a, b, there), (b, a, here)):
        try:
            same = digest_of(this.to(that.dtype)) == digest_of(that)
        except DAMAGED as error:
            return f"the values {told(error)}"
        if same:
            return f"the values are the same once converted to {text}"
    return "the values differ, too"
