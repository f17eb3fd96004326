"""The pages of the Python API and of the REST interface, and the table of the server's options."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from docs.markdown import NOTICE, split, table
from rankscope import agent
from rankscope.agent.steps.array_monitor import ArrayMonitor
from rankscope.agent.steps.hooks import StepListener
from rankscope.agent.steps.torch_monitor import TorchMonitor
from rankscope.agent.steps.uneven_inputs import JoinListener
from rankscope.client import Client
from rankscope.server.app import create_app
from rankscope.server.settings import Settings

# What of a monitor is called by hooks and by `attach`, and by no trainer.
_CALLED_BY_THE_AGENT = {
    "watches_class_of",
    *(name for kind in (StepListener, JoinListener) for name in dir(kind) if name[0] != "_"),
}


def python() -> str:
    """What `rankscope.agent` and `rankscope.client` offer, from their docstrings."""
    lines = [
        "# Python API",
        "",
        NOTICE,
        "",
        "A training script needs `from rankscope import agent` and one call. How it looks in each",
        "framework: [lines for each stack](using.md).",
    ]
    lines += _function("agent.attach", agent.attach) + _function("agent.start", agent.start)
    lines += ["", "## The monitor", "", "`attach` and `start` return a monitor for this rank."]
    for of, kind in (("attach", TorchMonitor), ("start", ArrayMonitor)):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_") or name in _CALLED_BY_THE_AGENT:
                continue
            if of == "start" and _same(name, member):
                continue
            lines += _function(f"monitor.{name}", member, level=3)
            if not _same(name, member):
                lines += ["", f"Of monitors that `{of}` returned."]
    lines += ["", "## The client", "", "[How it is used](python-client.md)."]
    lines += _function("rankscope.client.Client", Client, level=3)
    for name, member in vars(Client).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            lines += _function(f"client.{name}", member, level=3)
    return "\n".join(lines) + "\n"


def _same(name: str, member: Callable[..., Any]) -> bool:
    """Whether both kinds of monitor have this method, described alike."""
    doc = inspect.getdoc(member)
    return all(
        inspect.getdoc(getattr(kind, name, None)) == doc for kind in (TorchMonitor, ArrayMonitor)
    )


def _function(name: str, function: Callable[..., Any], *, level: int = 2) -> list[str]:
    signature = inspect.signature(function)
    given = [p for n, p in signature.parameters.items() if n != "self"]
    plain = signature.replace(parameters=given, return_annotation=inspect.Signature.empty)
    plain_text = re.sub(r": '([^']*)'", r": \1", str(plain))  # annotations are strings
    shown = f"{name}{_wrapped(plain_text)}"
    lines = ["", f"{'#' * level} {name}", "", "```text", shown, "```", ""]
    parts = split(inspect.getdoc(function) or "")
    for title, text in parts.items():
        if title:
            lines += ["", f"**{title}**", ""]
        lines += _entries(text) if title in ("Args", "Raises") else text
    return lines


def _wrapped(signature: str) -> str:
    if len(signature) < 70:
        return signature
    return "(\n    " + re.sub(r", (?![^\[]*\])", ",\n    ", signature[1:-1]) + ",\n)"


def _entries(text: list[str]) -> list[str]:
    """`name: what` and its continuation lines, as a list."""
    lines = []
    for line in text:
        if found := re.match(r"(\*{0,2}\w+): (.*)", line):
            lines.append(f"- `{found[1]}`: {found[2]}")
        else:
            lines.append(f"  {line.strip()}")
    return lines


def rest() -> str:
    """Every route and shape, from the application's OpenAPI description."""
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{Path(folder) / 'rankscope.db'}"
        app = create_app(Settings(database=database))
        openapi = app.openapi()
        app.state.engine.dispose()
    lines = [
        "# REST interface",
        "",
        NOTICE,
        "",
        "A running server has the same at `/docs`, and as OpenAPI at `/openapi.json`. Non-finite",
        'numbers are the strings `"NaN"`, `"Infinity"`, `"-Infinity"`. Times are RFC 3339, UTC.',
        "Lists have `items` and `next_cursor`. Errors are problems of RFC 9457, with `title`,",
        "`detail` and `status`. With tokens, a request needs `Authorization: Bearer TOKEN`",
        "([security](../SECURITY.md)).",
    ]
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            lines += _route(f"{method.upper()} {path}", operation)
    lines += ["", "## Shapes"]
    for name, shape in sorted(openapi["components"]["schemas"].items()):
        lines += ["", f"### {name}", ""]
        lines += (shape.get("description") or "").splitlines()
        needed = shape.get("required", ())
        rows = [
            (
                f"`{field}`" + ("" if field in needed else " (optional)"),
                _type(about),
                " ".join(about.get("description", "").split()),
            )
            for field, about in shape.get("properties", {}).items()
        ]
        if rows:
            lines += ["", *table(("field", "type", "meaning"), rows)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines) + "\n")


def _route(title: str, operation: Mapping[str, Any]) -> list[str]:
    lines = ["", f"## `{title}`", "", *(operation.get("description") or "").splitlines()]
    rows = [
        (
            f"`{p['name']}`",
            p["in"] + ("" if p.get("required") else ", optional"),
            _type(p["schema"]),
            " ".join(p.get("description", "").split()),
        )
        for p in operation.get("parameters", ())
    ]
    if rows:
        lines += ["", *table(("parameter", "in", "type", "meaning"), rows)]
    body = operation.get("requestBody", {}).get("content", {})
    if shape := body.get("application/json", {}).get("schema"):
        lines += ["", f"Body: {_type(shape)}."]
    for status, answer in operation["responses"].items():
        shape = answer.get("content", {}).get("application/json", {}).get("schema")
        if status.startswith("2"):
            lines += ["", f"Answers {status}" + (f": {_type(shape)}." if shape else ".")]
    return lines


def _type(schema: Mapping[str, Any]) -> str:
    """A type in a few words; shapes of the interface are links."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_type(one) for one in alternatives)
    if values := schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    if isinstance(kinds := schema.get("type"), list):
        return " or ".join(_type({**schema, "type": kind}) for kind in kinds)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("const") or schema.get("type") or "any")


def serve_options() -> list[str]:
    """The help of `rankscope serve`, as it is printed."""
    program = "from rankscope.agent.cli import main; raise SystemExit(main(['serve', '--help']))"
    printed = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "90", "PATH": ""},
    ).stdout
    _, _, options = printed.partition("options:\n")
    return ["```text", *(line[2:] for line in options.rstrip().splitlines()), "```"]
