"""`/docs`: the OpenAPI description as a plain page, with no script and nothing from outside."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any


def page(openapi: Mapping[str, Any]) -> str:
    """HTML of the reference."""
    sections = [
        _operation(path, method, operation)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = openapi.get("components", {}).get("schemas", {})
    shapes = [_shape(name, schema) for name, schema in sorted(schemas.items())]
    title = f"{escape(openapi['info']['title'])} {escape(openapi['info']['version'])}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}: REST interface</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }}
code, h2 {{ font-family: ui-monospace, monospace; }}
h2 {{ font-size: 1rem; margin: 2rem 0 .3rem; border-top: 1px solid #8884; padding-top: 1rem;
  overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; }}
td, th {{ text-align: left; padding: .1rem 1rem .1rem 0; vertical-align: top; }}
</style></head><body>
<h1>{title}: REST interface</h1>
<p>The same as <a href="openapi.json">OpenAPI</a>, for programs. Non-finite numbers are the strings
"NaN", "Infinity", "-Infinity"; errors are RFC 9457 problems; times are RFC 3339, UTC.</p>
{"".join(sections)}<h1>Shapes</h1>{"".join(shapes)}</body></html>"""


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    rows = [
        (f"{p['name']} ({p['in']})", _type(p.get("schema", {})), p.get("description", ""))
        for p in operation.get("parameters", ())
    ]
    answer = _answer(operation)
    return (
        f"<h2>{method.upper()} {escape(path)}</h2>"
        f"<p>{escape(operation.get('description', operation.get('summary', '')))}</p>"
        + _table(rows)
        + (f"<p>Answers <code>{escape(answer)}</code></p>" if answer else "")
    )


def _answer(operation: Mapping[str, Any]) -> str:
    for status, response in operation.get("responses", {}).items():
        if status.startswith("2"):
            for content in response.get("content", {}).values():
                return _type(content.get("schema", {}))
    return ""


def _shape(name: str, schema: Mapping[str, Any]) -> str:
    rows = [(key, _type(value), "") for key, value in schema.get("properties", {}).items()]
    text = escape(schema.get("description", ""))
    return f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{text}</p>{_table(rows)}'


def _table(rows: list[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(text)}</td>"
        for name, kind, text in rows
    )
    return f"<table>{lines}</table>"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(str(v) for v in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(s) for s in schema["anyOf"]))
    if isinstance(kinds := schema.get("type", "any"), list):
        return " | ".join(_type({**schema, "type": kind}) for kind in kinds)
    kind = str(kinds)
    return f"[{_type(schema.get('items', {}))}]" if kind == "array" else kind
