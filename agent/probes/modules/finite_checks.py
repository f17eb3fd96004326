"""Whether what modules take, make and pass back is finite: numbers that stay on their device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rankscope.agent.probes.norms import gathered, stored

# Checks of one step; what runs longer than that is checked in its first part.
MOST_CHECKS = 20_000


class Call(NamedTuple):
    """What a module took and gave; references, and no copies."""

    place: int
    module: torch.nn.Module
    given: Sequence[Any]
    outputs: list[torch.Tensor]


@dataclass(slots=True)
class Check:
    """Whether something was finite, numbers on its device.

    Attributes:
        module: name of the module that made it.
        direction: `forward` or `backward`.
        made, given, own: whether what was made, what it was made of, and the module's parameters
            were finite; None where there was nothing.
        of: in backward: what the gradient is one of.
    """

    module: str
    direction: str
    made: torch.Tensor | None
    given: torch.Tensor | None = None
    own: torch.Tensor | None = None
    of: str = ""

    def report(self, *, inputs_finite: bool, parameters_finite: bool) -> tuple[str, dict[str, Any]]:
        """The check as a sentence and as data, where `made` was not finite."""
        data: dict[str, Any] = {"module": self.module, "pass": self.direction}
        if self.direction == "backward":
            data["gradient"] = self.of
            text = f"the first value that is not finite: in backward, the gradient of {self.of}"
            return (f"{text}, made by {self.module}" if self.module else text), data
        text = f"the first value that is not finite: in forward, the output of {self.module}"
        if not parameters_finite:
            text += ", whose parameters are not finite"
        elif not inputs_finite:
            text += ", whose input is not finite: made before it, outside of any module"
        data |= {"input_finite": inputs_finite, "parameters_finite": parameters_finite}
        return text, data


@dataclass(slots=True)
class BackwardCheck:
    """Tensor hook: checks the gradient that comes back to a tensor.

    Attributes:
        checks: where it goes.
        module: whose output or parameter the tensor is; empty for none.
        parameter: name of the parameter in the module; empty for an output.
        consumers: modules that took the tensor: what they pass back is its gradient.
    """

    checks: list[Check]
    module: str
    parameter: str = ""
    consumers: list[str] = field(default_factory=list)

    def __call__(self, gradient: torch.Tensor) -> None:
        """Checks the gradient, and passes it on as it is."""
        if len(self.checks) >= MOST_CHECKS:
            return
        with torch.no_grad():
            finite = finiteness([gradient])
        if self.parameter:
            maker, of = self.module, f"{self.module}.{self.parameter}"
        else:
            # Of modules in one another the inner one.
            inner = [c for c in self.consumers if not any(_holds(c, d) for d in self.consumers)]
            maker = " or ".join(dict.fromkeys(inner))
            of = f"the output of {self.module}" if self.module else f"the input of {maker}"
        self.checks.append(Check(maker, "backward", finite, of=of))


def _holds(outer: str, inner: str) -> bool:
    return inner.startswith(f"{outer}.")


def numbers_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of real or complex numbers in what a module takes or gives."""
    if isinstance(value, torch.Tensor):
        if _has_numbers(value):
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from numbers_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers_in(item)


def _has_numbers(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all elements are finite, of tensors on the host."""
    flag = finiteness(tensors)
    return flag is None or bool(flag)


def finiteness(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Whether all elements are finite, one number on their device; None for no elements."""
    dense = [stored(t) for t in tensors]
    found = [torch.isfinite(t).all() for t in dense if t is not None]
    if len(found) > 1:
        return gathered(found).all()
    return found[0] if found else None
