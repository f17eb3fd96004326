"""Two tensors of the same shape and type, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from rankscope.agent.checkpoints.source import Part
from rankscope.agent.fingerprint.values import as_numbers, flat, lookup_row, real

# Elements that are looked at at a time: what lies between does not grow with the tensor.
_ROUND = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bits of the exponent, of floats that have them between a sign and a fraction.
_EXPONENTS = {torch.float64: 11, torch.float32: 8, torch.bfloat16: 8, torch.float16: 5}


@dataclass(frozen=True, slots=True)
class FlippedBit:
    """The one bit by which two tensors differ.

    Attributes:
        bit: its number in the element, from 0 for the lowest.
        part: `sign`, `exponent` or `fraction` of a float; empty for other types.
    """

    bit: int
    part: str


@dataclass(frozen=True, slots=True)
class ElementDifference:
    """How two tensors differ.

    Attributes:
        elements: number of elements whose bits differ.
        total: number of all elements.
        first: index of the first of them.
        at_first: its values in both.
        largest: largest absolute difference of numbers that are finite in both; 0 where bits alone
            differ.
        relative: norm of the difference over the norm of the reference, of finite numbers; NaN
            where the reference has none but zeros.
        nonfinite: elements that differ and are NaN or infinite in either.
        flipped: the bit, where one alone of several elements differs.
        files: of the parts in which elements differ.
    """

    elements: int
    total: int
    first: tuple[int, ...]
    at_first: tuple[complex | float | int | bool, complex | float | int | bool]
    largest: float
    relative: float
    nonfinite: int
    flipped: FlippedBit | None
    files: tuple[str, ...] = ()


def compare(
    reference: torch.Tensor, other: torch.Tensor, parts: tuple[tuple[Part, ...], ...] = ()
) -> ElementDifference | None:
    """How two tensors differ; None where all bits are the same.

    Args:
        reference: of any shape and type, on the CPU.
        other: of the same.
        parts: the files that hold each of them.
    """
    number, per_element = real(reference.dtype)
    ours, theirs = as_numbers(flat(reference)), as_numbers(flat(other))
    word = _WORDS[ours.element_size()]
    found = _Found()
    for begin in range(0, len(ours), _ROUND):
        a, b = ours[begin : begin + _ROUND], theirs[begin : begin + _ROUND]
        differing = (a.view(word) != b.view(word)).nonzero().view(-1)
        numbers = _numbers(flat(reference)[begin : begin + _ROUND])
        found.norm += _squares(numbers)
        if len(differing):
            places = (differing + begin).div(per_element, rounding_mode="floor").unique()
            found.add_places(places, reference.shape, parts)
            others = _numbers(flat(other)[begin : begin + _ROUND])
            found.add_sizes(numbers[differing], others[differing])
    if not found.elements:
        return None
    pair = reference.reshape(-1)[found.first], other.reshape(-1)[found.first]
    return ElementDifference(
        elements=found.elements,
        total=reference.numel(),
        first=_index(found.first, reference.shape),
        at_first=(_value(pair[0]), _value(pair[1])),
        largest=found.largest,
        relative=math.sqrt(found.squares / found.norm) if found.norm else math.nan,
        nonfinite=found.nonfinite,
        # A counter of one element is one bit away from its neighbour half of the time.
        flipped=_flipped(*pair, number) if found.elements == 1 < reference.numel() else None,
        files=tuple(sorted(found.files)),
    )


@dataclass(slots=True)
class _Found:
    """What the rounds so far have found."""

    elements: int = 0
    first: int = 0
    nonfinite: int = 0
    largest: float = 0.0
    squares: float = 0.0
    norm: float = 0.0
    files: set[str] = field(default_factory=set)

    def add_places(
        self, places: torch.Tensor, shape: torch.Size, parts: tuple[tuple[Part, ...], ...]
    ) -> None:
        if not self.elements:
            self.first = int(places[0])
        self.elements += len(places)
        for own in parts:
            self.files |= _files(places, shape, own)

    def add_sizes(self, a: torch.Tensor, b: torch.Tensor) -> None:
        finite = a.isfinite() & b.isfinite()
        self.nonfinite += int((~finite).sum())
        if bool(finite.any()):
            apart = (a - b)[finite].abs()
            self.largest = max(self.largest, float(apart.max()))
            self.squares += float(apart.dot(apart))


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Values as float64; the bytes of a type that torch cannot convert."""
    if lookup_row(values.dtype) is None:
        values = as_numbers(values)
    return values.to(torch.float64)


def _squares(numbers: torch.Tensor) -> float:
    finite = numbers.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.dot(finite))


def _value(element: torch.Tensor) -> complex | float | int | bool:
    value: complex | float | int | bool = element.item()
    return value


def _index(place: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, within = divmod(place, size)
        index.append(within)
    return tuple(reversed(index))


def _flipped(a: torch.Tensor, b: torch.Tensor, number: torch.dtype) -> FlippedBit | None:
    size = a.element_size()
    octets = [int.from_bytes(bytes(flat(x).view(torch.uint8).tolist()), "little") for x in (a, b)]
    changed = octets[0] ^ octets[1]
    if changed.bit_count() != 1:
        return None
    # Of a complex number, the bit of its real or imaginary part.
    width = 8 * (size // (2 if a.is_complex() else 1))
    bit = (changed.bit_length() - 1) % width
    part = ""
    if (exponent := _EXPONENTS.get(number)) is not None:
        fraction = width - 1 - exponent
        part = "sign" if bit == width - 1 else "exponent" if bit >= fraction else "fraction"
    return FlippedBit(bit, part)


def _files(places: torch.Tensor, shape: torch.Size, parts: tuple[Part, ...]) -> set[str]:
    """Files whose part of a tensor has one of these places."""
    if len(parts) < 2:
        return {part.file for part in parts}
    index = torch.unravel_index(places, shape)
    found = set()
    for part in parts:
        within = torch.ones_like(places, dtype=torch.bool)
        for at, begin, size in zip(index, part.begin, part.size, strict=True):
            within &= (at >= begin) & (at < begin + size)
        if bool(within.any()):
            found.add(part.file)
    return found
