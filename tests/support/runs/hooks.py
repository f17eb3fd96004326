"""torch's communication hooks in arrays, as `ddp_comm_hooks` has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RATE = 2.0


class Averaged:
    """The mean of all ranks, without a hook."""

    config: dict[str, object] = {}

    def reduced(self, entering: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """float32 tensors out of those of all ranks."""
        return [np.mean(parts, axis=0, dtype=np.float32) for parts in zip(*entering, strict=True)]


class Half(Averaged):
    """`fp16_compress_hook`: made smaller, divided, and added up in float16."""

    config = {"communication_hooks": ["fp16_compress_hook"]}

    def reduced(self, entering: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        ranks = np.float16(len(entering))
        return [
            np.sum([p.astype(np.float16) / ranks for p in parts], axis=0, dtype=np.float16).astype(
                np.float32
            )
            for parts in zip(*entering, strict=True)
        ]


class LowRank(Averaged):
    """`powerSGD_hook` with warm start.

    Args:
        rank: of the products that are sent instead of matrices.
        feedback: what is left out of a step is added to the next one's gradient.
        whole: as `batched_powerSGD_hook`: no tensor is left alone.
    """

    def __init__(self, rank: int = 1, *, whole: bool = False, feedback: bool = True) -> None:
        self.rank = rank
        self.feedback = feedback
        self.whole = whole
        name = "batched_powerSGD_hook" if whole else "powerSGD_hook"
        low = {"rank": rank, "least_rate": RATE, "feedback": feedback}
        self.config = {"communication_hooks": [name], "low_rank": low}
        self._errors: list[list[np.ndarray]] = []
        self._right: dict[int, np.ndarray] = {}
        self._random = np.random.default_rng(3)

    def reduced(self, entering: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        if not self._errors:
            self._errors = [[np.zeros_like(t) for t in tensors] for tensors in entering]
        sent = [
            [t + e for t, e in zip(tensors, errors, strict=True)]
            for tensors, errors in zip(entering, self._errors, strict=True)
        ]
        if self.whole:
            sizes = [t.size for t in sent[0]]
            side = int(np.ceil(np.sqrt(sum(sizes))))
            squares = []
            for tensors in sent:
                flat = np.zeros(side * side, np.float32)
                flat[: sum(sizes)] = np.concatenate([t.ravel() for t in tensors])
                squares.append(flat.reshape(side, side))
            flat = self._product(0, squares).ravel()[: sum(sizes)]
            parts = np.split(flat, np.cumsum(sizes)[:-1])
            made = [p.reshape(t.shape) for p, t in zip(parts, sent[0], strict=True)]
        else:
            made = [self._one(i, parts) for i, parts in enumerate(zip(*sent, strict=True))]
        if self.feedback:
            self._errors = [[t - m for t, m in zip(tensors, made, strict=True)] for tensors in sent]
        return made

    def _one(self, index: int, parts: Sequence[np.ndarray]) -> np.ndarray:
        rows, columns = parts[0].shape[0], int(np.prod(parts[0].shape[1:]))
        rank = min(rows, columns, self.rank)
        if (rows + columns) * rank * RATE >= rows * columns:
            return np.mean(parts, axis=0, dtype=np.float32)
        return self._product(index, [p.reshape(rows, columns) for p in parts]).reshape(
            parts[0].shape
        )

    def _product(self, index: int, parts: Sequence[np.ndarray]) -> np.ndarray:
        rank = min(*parts[0].shape, self.rank)
        if index not in self._right:
            drawn = self._random.standard_normal((parts[0].shape[1], rank))
            self._right[index] = drawn.astype(np.float32)
        right, _ = np.linalg.qr(self._right[index])
        left, _ = np.linalg.qr(np.sum([p @ right for p in parts], axis=0, dtype=np.float32))
        right = np.mean([p.T @ left for p in parts], axis=0, dtype=np.float32)
        self._right[index] = right
        return (left @ right.T).astype(np.float32)


def hook_of(name: str) -> Averaged:
    """By the name that the agent reports; empty for none."""
    made: dict[str, Averaged] = {
        "": Averaged(),
        "fp16_compress_hook": Half(),
        "powerSGD_hook": LowRank(),
        "powerSGD_hook, no feedback": LowRank(feedback=False),
        "batched_powerSGD_hook": LowRank(whole=True),
    }
    return made[name]
