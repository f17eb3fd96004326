"""How inputs are distributed, in a few numbers that are the same of all data alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rankscope.agent.probes.data.given import is_whole, wide

# Series of them, with "/" and a number.
NUMBERS, TOKENS = "input_moments", "token_moments"
# Random directions, and as many products of neighbouring ones: what two kinds of data differ in is
# missed by one direction in two, and by all of them in one of sixteen.
_DIRECTIONS = 4
# Samples of a batch, and elements of each, that are looked at: 4,096 in all, as of `input_rms`.
_SAMPLES, _ELEMENTS = 64, 64
# Elements that are copied where they do not lie one after the other: 1 MiB.
_COPIED = 1 << 18
# Shapes whose directions are kept: sequences may have any length.
_SHAPES = 64
# Odd multipliers of splitmix64 (Steele et al. 2014), as signed numbers.
_FIRST, _SECOND = -0x61C8_8646_80B5_83EB, -0x40A7_B892_E31B_1A47
# A prime beyond any vocabulary: a pair of tokens is one number.
_PAIR = 1_000_003
# The lowest bit of each quarter of a number.
_LANES = 0x0001_0001_0001_0001


class InputMoments:
    """Takes them of batches; of each shape it keeps the directions, a tensor of a few KiB."""

    def __init__(self) -> None:
        self._directions: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[str, torch.Tensor] | None:
        """Moments of the first input of real numbers, or else of the first one of whole numbers.

        Args:
            tensors: what a model is given, [samples, ...] each.

        Returns:
            their series and float [12]. `input_moments`, of real numbers: means over the samples
            of their projections onto four directions of random signs, of the squares of these, and
            of the products of each with the next; of up to 64 elements of a sample.
            `token_moments`, of whole numbers (tokens, numbers of users) that are no pixels: mean
            signs by eight bits of a hash of each, and by four of each pair of neighbours (0 without
            neighbours). None where there is nothing of the kind.
        """
        real = next((t for t in tensors if t.is_floating_point() and t.element_size() > 1), None)
        if real is None:
            real = next((t for t in tensors if is_whole(t) and t.dim() > 2), None)
        with torch.no_grad():
            if real is not None:
                moments = self._of_numbers(real.detach())
                return None if moments is None else (NUMBERS, moments)
            whole = next((t for t in tensors if is_whole(t) and t.numel()), None)
            return None if whole is None else (TOKENS, _of_tokens(whole.detach()))

    def _of_numbers(self, inputs: torch.Tensor) -> torch.Tensor | None:
        if inputs.dim() < 2 or not inputs.numel():
            return None
        # Images with channels last as they lie, whatever the size of the batch: the same elements.
        if inputs.dim() > 2 and (last := inputs.movedim(1, -1)).is_contiguous():
            inputs = last
        elif not inputs.is_contiguous() and inputs[:_SAMPLES].numel() > _COPIED:
            return None
        some = inputs[:_SAMPLES].flatten(1)
        # Odd: no column of an image again and again.
        some = some[:, :: -(-some.shape[1] // _ELEMENTS) | 1].to(wide(inputs.dtype))
        # No matrix product: autocast would make it one of half precision.
        projected = (some[:, :, None] * self._signs(some)).sum(1)
        beside = projected * projected.roll(1, 1)
        return torch.cat((projected, projected * projected, beside), 1).mean(0)

    def _signs(self, some: torch.Tensor) -> torch.Tensor:
        """Directions, [elements, 4] of length 1 each, of samples of a size."""
        size = some.shape[1]
        key = (size, some.dtype, some.device)
        known = self._directions.get(key)
        if known is None:
            if len(self._directions) >= _SHAPES:
                self._directions.clear()
            places = _hashed(torch.arange(size, device=some.device))
            bits = torch.arange(_DIRECTIONS, device=some.device)
            signs = ((places[:, None] >> bits) & 1) * 2 - 1
            known = self._directions[key] = signs.to(some.dtype) / size**0.5
        return known


def _of_tokens(inputs: torch.Tensor) -> torch.Tensor:
    """Mean signs by bits of the hash of tokens, and of pairs of neighbours; float32 [12]."""
    if inputs.dim() < 2:
        inputs = inputs.reshape(-1, 1)[: _SAMPLES * _ELEMENTS]
    # One more than are counted: of pairs there is one less.
    some = inputs[:_SAMPLES, : _ELEMENTS + 1].to(torch.int64)
    hashed = _hashed(some)
    found = [_mean_signs(hashed), _mean_signs(hashed >> 1)]
    if some.shape[1] > 1:
        found.append(_mean_signs(_hashed(some[:, :-1] * _PAIR + some[:, 1:])))
    else:
        found.append(torch.zeros(_DIRECTIONS, device=some.device))
    return torch.cat(found)


def _hashed(numbers: torch.Tensor) -> torch.Tensor:
    """Mixes the bits of whole numbers, int64 of any shape (splitmix64)."""
    mixed = (numbers + 1) * _FIRST
    mixed = (mixed ^ (mixed >> 30)) * _SECOND
    return mixed ^ (mixed >> 27)


def _mean_signs(hashed: torch.Tensor) -> torch.Tensor:
    """1 or -1 by each of four bits, the mean over up to 65,535 numbers; float32 [4].

    The bits of all are counted with one addition: each has sixteen to itself.
    """
    lanes = torch.arange(0, 64, 16, device=hashed.device)
    counts = ((hashed & _LANES).sum() >> lanes) & 0xFFFF
    return counts.to(torch.float32) * (2 / hashed.numel()) - 1
