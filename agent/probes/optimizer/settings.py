"""Settings of the optimizer, for each group of parameters."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import torch

from rankscope.agent.model.tensors import number
from rankscope.agent.probes.base import Context, Probe, StepFacts

_STAGE = "hyperparameters"
# Not settings: what they are for. The learning rate has a series of its own.
_NO_SETTINGS = frozenset(("params", "param_names"))
_NO_SERIES = frozenset(("lr",))
_MAX_GROUPS = 64
_PLAIN = frozenset((bool, int, float, str, type(None)))


class Settings(Probe):
    """The digest `hyperparameters`, and `hyperparameters/<group>/<setting>` where it changes.

    Costs about 3 microseconds a parameter group (tier `signals`).

    The digest covers the plain settings of all groups (numbers by their exact bits, switches,
    texts, absent ones), whatever the order in which they were given. What is on a device is left
    out: it could not be read without waiting.

    The series are posted at the start and after a change, those of a further group at the start
    only where it differs from the first. Beyond 64 groups there is the digest alone.
    """

    name = "settings"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._seen: list[dict[str, Any]] = []
        self._digest = 0

    def after_step(self, facts: StepFacts) -> None:
        """What this step has applied: a scheduler may change it right after."""
        if not self.context.signals:
            return
        with facts.charged("signals"):
            now = [_plain(group) for group in self.context.optimizer.param_groups]
            if now != self._seen:
                self._post(facts, now)
                self._seen = now
                self._digest = digest_of(now)
            facts.digests[_STAGE] = self._digest

    def _post(self, facts: StepFacts, now: list[dict[str, Any]]) -> None:
        first = now[0] if now else {}
        for index, settings in enumerate(now[:_MAX_GROUPS]):
            # Of a group that was not there before, what the first one has goes without saying.
            before = self._seen[index] if index < len(self._seen) else first if index else {}
            for key, value in settings.items():
                if (
                    isinstance(value, int | float)
                    and before.get(key) != value
                    and key not in _NO_SERIES
                ):
                    facts.scalars[f"{_STAGE}/{index}/{key}"[:200]] = float(value)


def digest_of(groups: list[dict[str, Any]]) -> int:
    """64-bit hash of the settings of all groups."""
    parts: list[bytes] = []
    for settings in groups:
        parts.append(struct.pack("<I", len(settings)))
        for key in sorted(settings):
            name, text = key.encode(), _canonical(settings[key])
            parts += (struct.pack("<II", len(name), len(text)), name, text)
    hashed = hashlib.blake2b(b"".join(parts), digest_size=8).digest()
    return int.from_bytes(hashed, "little")


def _plain(group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in group.items():
        if type(value) in _PLAIN:
            found[key] = value
        elif key in _NO_SETTINGS:
            continue
        elif isinstance(value, tuple | list):
            for index, item in enumerate(value):
                _add(found, f"{key}.{index}", item)
        else:
            _add(found, key, value)
    return found


def _add(found: dict[str, Any], key: str, value: Any) -> None:
    if type(value) is torch.Tensor and value.is_cpu and value.numel() == 1:
        found[key] = number(value)
    elif isinstance(value, bool | int | float | str) or value is None:
        found[key] = value


def _canonical(value: Any) -> bytes:
    # 1 and 1.0 and True do the same to a step.
    if isinstance(value, int | float):
        try:
            return b"n" + struct.pack("<d", value)
        except OverflowError:
            return b"i" + str(value).encode()
    return b"-" if value is None else b"t" + str(value).encode()
