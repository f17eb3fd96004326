"""Tables and docstrings as Markdown: what the generated pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTICE = "<!-- Written by docs/generate.py (`make docs`). Do not edit by hand. -->"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table; a `|` inside a cell stays in it."""
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {line} |" for line in lines]


def split(docstring: str) -> dict[str, list[str]]:
    """A google-style docstring by its sections: title -> lines; what comes first under ""."""
    parts: dict[str, list[str]] = {"": []}
    title = ""
    for line in docstring.splitlines():
        if line.endswith(":") and line[:-1].istitle() and not line.startswith(" "):
            title = line[:-1]
            parts[title] = []
        else:
            parts[title].append(line.removeprefix("    ") if title else line)
    return {title: _stripped(lines) for title, lines in parts.items()}


def sections(docstring: str) -> list[str]:
    """A google-style docstring: sections become headings, and lose their indent."""
    parts = split(docstring)
    lines = parts.pop("")
    for title, text in parts.items():
        lines += ["", f"### {title}", "", *text]
    return lines


def _stripped(lines: list[str]) -> list[str]:
    return "\n".join(lines).strip("\n").splitlines()
