"""Random states: which numbers the trainer will draw next."""

from __future__ import annotations

import array
import hashlib
import random
import sys

import torch

from rankscope.agent.probes.base import Probe, StepFacts


class RandomState(Probe):
    """Digests `rng/torch`, `rng/cuda`, `rng/numpy`, `rng/python`; about 50 microseconds (`state`).

    They are read and never written: copies of the states are hashed. On CUDA the state is a seed
    and an offset that torch keeps on the host, so reading it waits for nothing; it is that of the
    current device. numpy's is that of `numpy.random` itself
    (generators of the trainer's own are not seen).
    """

    name = "rng"
    sampled = True

    def after_step(self, facts: StepFacts) -> None:
        """What the step left."""
        if not self.context.state:
            return
        with facts.charged("state"):
            digests = facts.digests
            digests["rng/torch"] = _hash(torch.default_generator.get_state().numpy())
            digests["rng/python"] = _python()
            generator = _cuda()
            if generator is not None:
                digests["rng/cuda"] = _hash(generator.get_state().numpy())
            drawn = sys.modules.get("numpy.random")
            if drawn is not None:
                state = drawn.get_state(legacy=False)
                if state.get("bit_generator") == "MT19937":
                    inner = state["state"]
                    digests["rng/numpy"] = _hash(
                        inner["key"],
                        str((inner["pos"], state["has_gauss"], state["gauss"])).encode(),
                    )


def _python() -> int:
    version, numbers, gauss = random.getstate()
    return _hash(array.array("Q", numbers), str((version, gauss)).encode())


def _cuda() -> torch.Generator | None:
    if not torch.cuda.is_initialized():
        return None
    generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return generator


def _hash(state: object, more: bytes = b"") -> int:
    hashed = hashlib.blake2b(state, digest_size=8)  # type: ignore[arg-type]
    hashed.update(more)
    return int.from_bytes(hashed.digest(), "little")
