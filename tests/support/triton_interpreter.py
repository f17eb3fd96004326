"""Triton's kernels of the fingerprints in Triton's interpreter, in a process of its own.

The interpreter needs no device. Whether kernels are interpreted is read off `TRITON_INTERPRET` when
they are defined, those of Triton's own library among them; so it has to be set before anything
imports Triton, which in a process of many tests something always has (`torch.compile` does).
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch


def computed(tensors: Sequence[torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """What the kernels make of tensors that lie on a device, in this process.

    Returns:
        `digests` int64 [tensors], `sketches` float64 [tensors, BUCKETS] and `squares` float64
        [tensors], on the host; each of them also as computed without the others, or one by one.
    """
    from rankscope.agent.fingerprint.constants import BUCKETS
    from rankscope.agent.fingerprint.device_triton import TritonKernels
    from rankscope.agent.fingerprint.results import Results

    kernels = TritonKernels(tensors, device)
    readable, found = kernels.all_readable(tensors)
    addresses = torch.from_numpy(found).to(device)
    aligned = not bool((addresses % 16).any())

    def nothing() -> Results:
        # What nothing is written to must not look like a result.
        count, nan = len(tensors), float("nan")
        return Results(
            torch.full((count, BUCKETS), nan, dtype=torch.float64, device=device),
            torch.full((count,), nan, dtype=torch.float64, device=device),
            torch.full((count,), -1, dtype=torch.int64, device=device),
        )

    both, digests, sketches, single = (nothing() for _ in range(4))
    kernels.launch(addresses, both, aligned=aligned, digests=True, sketches=True)
    kernels.launch(addresses, digests, aligned=aligned, digests=True, sketches=False)
    kernels.launch(addresses, sketches, aligned=False, digests=False, sketches=True)
    kernels.begin_one_by_one()
    for row, tensor in enumerate(readable):
        kernels.launch_one(row, tensor.data_ptr())
    kernels.end_one_by_one(single)
    return {
        "digests": both.digests.cpu(),
        "sketches": both.sketches.cpu(),
        "squares": both.squares.cpu(),
        "digests alone": digests.digests.cpu(),
        "sketches alone": sketches.sketches.cpu(),
        "squares alone": sketches.squares.cpu(),
        "one by one": single.sketches.cpu(),
        "squares one by one": single.squares.cpu(),
    }


class TritonInterpreter:
    """A process in which Triton interprets; a context manager."""

    def __enter__(self) -> TritonInterpreter:
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # it ends at the end of what it is given
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def computed(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """As the function of that name, of tensors on the host.

        Raises:
            AssertionError: it failed there; with the trace.
        """
        _write(self._process.stdin, list(tensors))
        answer = _read(self._process.stdout)
        assert answer is not None, f"the interpreter has ended: {self._process.wait()}"
        assert "failed" not in answer, answer["failed"]
        found: dict[str, torch.Tensor] = answer
        return found


def _write(stream: Any, thing: Any) -> None:
    buffer = io.BytesIO()
    torch.save(thing, buffer)  # keeps strides, conjugation and where in its storage a tensor begins
    stream.write(len(buffer.getvalue()).to_bytes(8, "big") + buffer.getvalue())
    stream.flush()


def _read(stream: Any) -> Any:
    """What was written; None at the end."""
    length = stream.read(8)
    return torch.load(io.BytesIO(stream.read(int.from_bytes(length, "big")))) if length else None


def _serve() -> None:
    # What anything prints must not get in between the answers.
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while (tensors := _read(sys.stdin.buffer)) is not None:
        try:
            answer: dict[str, Any] = dict(computed(tensors, torch.device("cpu")))
        except Exception:  # noqa: BLE001 - reported where it was asked for
            answer = {"failed": traceback.format_exc()}
        _write(answers, answer)


if __name__ == "__main__":
    _serve()
