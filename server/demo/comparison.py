"""What was injected against what was found. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope.server.demo.faults import Injection

_SERIOUS = ("warning", "critical")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on the demo itself.

    Attributes:
        injected: one line on what was broken.
        found: a line on each root alert of severity warning or above.
        wrong: what is not as it has to be, one sentence each; empty: all is as injected.
    """

    injected: str
    found: tuple[str, ...]
    wrong: tuple[str, ...]

    @property
    def as_injected(self) -> bool:
        """Whether what was found is what was injected."""
        return not self.wrong


def compare(
    injection: Injection, alerts: Sequence[Mapping[str, Any]], *, world_size: int
) -> Comparison:
    """Holds a run's root alerts (as the API gives them) against the injected fault."""
    serious = [alert for alert in alerts if alert["severity"] in _SERIOUS]
    wrong: list[str] = []
    if not injection.fault.kinds:
        wrong = ["nothing was injected, and there is an alert"] if serious else []
    elif not serious:
        wrong = ["there is no alert of severity warning or above"]
    elif len(serious) > 1:
        wrong = [f"there are {len(serious)} root alerts, and there must be one"]
    else:
        wrong = _differences(injection, serious[0], world_size)
    return Comparison(
        injected=describe(injection),
        found=tuple(f"{a['kind']} {_where(a)}" for a in serious) or ("nothing",),
        wrong=tuple(wrong),
    )


def describe(injection: Injection) -> str:
    """One line on what is broken where."""
    fault = injection.fault
    if injection.step is None:
        return fault.name
    where = "all ranks" if injection.rank is None else f"rank {injection.rank}"
    tensor = "" if injection.tensor is None else f", tensor {injection.tensor}"
    return f"{fault.name} at step {injection.step} on {where}{tensor}"


def _differences(injection: Injection, alert: Mapping[str, Any], world_size: int) -> list[str]:
    fault, step = injection.fault, injection.step
    wrong = []
    if alert["kind"] not in fault.kinds:
        wrong.append(f"the kind is {alert['kind']} and not {' or '.join(fault.kinds)}")
    expected = injection.expected_ranks(world_size)
    if fault.names_rank and tuple(alert["ranks"]) != expected:
        wrong.append(f"the ranks are {_list(alert['ranks'])} and not {_list(expected)}")
    if step is not None and abs(alert["first_step"] - step) > fault.tolerance:
        beside = f" (or up to {fault.tolerance} beside it)" if fault.tolerance else ""
        wrong.append(f"the first step is {alert['first_step']} and not {step}{beside}")
    if injection.tensor is not None and list(alert["tensors"]) != [injection.tensor]:
        wrong.append(
            f"the tensors are {_list(alert['tensors']) or 'not named'} and not {injection.tensor}"
        )
    return wrong


def _where(alert: Mapping[str, Any]) -> str:
    ranks = alert["ranks"]
    on = f" on rank{'s' if len(ranks) > 1 else ''} {_list(ranks)}" if ranks else ""
    tensors = alert["tensors"]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    tensor = f", tensor {tensors[0]}{more}" if tensors else ""
    return f"since step {alert['first_step']}{on}{tensor}"


def _list(items: Sequence[object]) -> str:
    return ", ".join(str(item) for item in items)
