"""Writes `client/models/`, the dataclasses of the Python client, from the server's own shapes."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from rankscope.server.api import (
    alert_models,
    audit,
    comparison_models,
    data,
    detector_models,
    fleet,
    models,
    notification_models,
)

# What the methods of the client return; what these consist of comes with them.
ANSWERS: tuple[type[BaseModel], ...] = (
    models.Accepted,
    models.Project,
    models.RunDetail,
    models.Tags,
    models.Metric,
    models.MetricFamily,
    models.Series,
    models.Comparison,
    models.Matrix,
    models.Verdict,
    alert_models.AlertDetail,
    alert_models.AlertContext,
    alert_models.Silence,
    comparison_models.Compared,
    detector_models.Detectors,
    detector_models.ProjectDetectors,
    notification_models.NotificationTarget,
    notification_models.Notification,
    notification_models.Delivery,
    fleet.Fleet,
    data.Data,
    audit.AuditEntry,
)
# Module of the server -> module of the client, and what it holds.
_MODULES: dict[str, tuple[str, str]] = {
    models.__name__: ("runs", "Runs, their series and their verdicts"),
    fleet.__name__: ("fleet", "What is open in all runs"),
    data.__name__: ("data", "What the ranks of a run read"),
    audit.__name__: ("audit", "Administrative acts"),
    notification_models.__name__: ("notifications", "Who is told of alerts"),
    alert_models.__name__: ("alerts", "Alerts and silences"),
    comparison_models.__name__: ("comparison", "Two runs side by side"),
    detector_models.__name__: ("detectors", "Detectors and their settings"),
}
_ALIASES = {
    models.Severity: "Severity",
    models.RunState: "RunState",
    models.VerdictName: "VerdictName",
}
_PACKAGE = "rankscope.client.models"
_NOTICE = "Written by docs/client_models.py (`make docs`). Do not edit by hand."


def sources() -> dict[str, str]:
    """The modules by their names, formatted."""
    ordered: dict[type[BaseModel], None] = {}
    for answer in ANSWERS:
        _gather(answer, ordered)
    home = {model.__name__: _MODULES[model.__module__][0] for model in ordered}
    home |= dict.fromkeys(_ALIASES.values(), "runs")
    found = {}
    for module, (name, what) in _MODULES.items():
        bodies = [_dataclass(model) for model in ordered if model.__module__ == module]
        if name == "runs":
            bodies.insert(0, "\n".join(f"{n} = {_literal(a)}" for a, n in _ALIASES.items()))
        text = "\n\n\n".join(bodies)
        found[name] = _formatted(
            f'"""{what}.\n\n{_NOTICE}\n"""\n', _imports(text, name, home), text
        )
    lines = [f"from {_PACKAGE}.{home[name]} import {name} as {name}" for name in sorted(home)]
    about = "What a server answers: times are `datetime`; numbers `float`, NaN and infinities too."
    found["__init__"] = _formatted(f'"""{about}\n\n{_NOTICE}\n"""\n', "\n".join(lines), "")
    return found


def _imports(text: str, module: str, home: dict[str, str]) -> str:
    """The lines for what the dataclasses of a module name."""
    words = set(re.findall(r"\w+", text))
    lines = ["from __future__ import annotations", "from dataclasses import dataclass"]
    lines += ["from datetime import datetime"] * ("datetime" in words)
    typed = sorted({"Any", "Literal"} & words)
    lines += [f"from typing import {', '.join(typed)}"] * bool(typed)
    lines += [
        f"from {_PACKAGE}.{where} import {name}"
        for name, where in home.items()
        if where != module and name in words
    ]
    return "\n".join(lines)


def _formatted(head: str, imports: str, text: str) -> str:
    """A module as `make fix` leaves it."""
    source = "\n\n".join([head, imports, text])
    for words in (["check", "--quiet", "--fix", "--select", "I"], ["format"]):
        command = [sys.executable, "-m", "ruff", *words, "--stdin-filename", "client/x.py", "-"]
        source = subprocess.run(
            command, input=source, capture_output=True, text=True, check=True
        ).stdout
    return source


def _gather(model: type[BaseModel], found: dict[type[BaseModel], None]) -> None:
    """Adds a shape after those that it is made of."""
    if model in found:
        return
    for part in _bases(model):
        _gather(part, found)
    for annotation in _own(model).values():
        for part in _models_in(annotation):
            _gather(part, found)
    found[model] = None


def _bases(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Shapes it extends; a list with more beside its items extends none."""
    bases = [base for base in model.__bases__ if issubclass(base, BaseModel)]
    return [b for b in bases if b is not BaseModel and not issubclass(b, models.Items)]


def _own(model: type[BaseModel]) -> dict[str, Any]:
    """Members that it does not inherit, with their annotations."""
    inherited = {name for base in _bases(model) for name in base.model_fields}
    fields = model.model_fields.items()
    return {n: f.annotation for n, f in fields if n not in inherited and n != "next_cursor"}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


def _dataclass(model: type[BaseModel]) -> str:
    bases = "".join(f"({base.__name__})" for base in _bases(model))
    lines = ["@dataclass(frozen=True)", f"class {model.__name__}{bases}:"]
    described = {
        name: model.model_fields[name].description
        for name in _own(model)
        if model.model_fields[name].description
    }
    text = inspect.cleandoc(model.__doc__ or "")
    if described:
        text += "\n\nAttributes:\n"
        text += "\n".join(f"    {name}: {what}." for name, what in described.items())
    if "\n" in text:
        text += "\n"
    lines += [*f'    """{text}"""'.replace("\n", "\n    ").splitlines(), ""]
    for name, annotation in _own(model).items():
        lines.append(f"    {name}: {_type(annotation)}")
    return "\n".join(lines)


def _literal(annotation: Any) -> str:
    return f"Literal[{', '.join(repr(part) for part in typing.get_args(annotation))}]"


def _type(annotation: Any) -> str:
    if annotation in _ALIASES:
        return _ALIASES[annotation]
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin is typing.Literal:
        return _literal(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type(part) for part in parts)
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(_type(part) for part in parts)}]"
    if annotation is types.NoneType:
        return "None"
    if annotation is Any:
        return "Any"
    if annotation in (str, int, float, bool, datetime) or issubclass(annotation, BaseModel):
        return str(annotation.__name__)
    raise TypeError(f"{annotation} is no type that the client knows")
