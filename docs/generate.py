"""Writes the pages of the documentation that say what the code says: `make docs`.

`tests/test_docs.py` compares them with what stands in the repository.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rankscope.agent.cli import COMMANDS
from rankscope.agent.options import OPTIONS
from rankscope.server.demo.faults import DEFAULT_FAULT, FAULTS
from rankscope.server.detectors import DETECTORS

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
_NOTICE = "<!-- Written by docs/generate.py (`make docs`). Do not edit by hand. -->"


def detectors() -> str:
    """Reference of everything that can be found: the docstrings of the detectors."""
    lines = [
        "# What Rankscope looks for",
        "",
        _NOTICE,
        "",
        "Each detector answers for every run: `ok`, `open`, or why it could not judge",
        "(`insufficient_data`, `missing_input`, `not_applicable`, `suspended`). The verdict",
        "carries all answers: what was not checked never reads as passed.",
        "",
        *_table(
            ("kind", "needs", "ranks"),
            (
                (
                    f"[`{kind}`](#{_anchor(kind)})",
                    ", ".join(f"`{name}`" for name in detector.needs) or "-",
                    f"{detector.min_ranks} or more",
                )
                for detector in DETECTORS
                for kind in detector.kinds
            ),
        ),
    ]
    for detector in DETECTORS:
        for kind in detector.kinds:
            lines += ["", f'<a id="{_anchor(kind)}"></a>']
        lines += ["", f"## {', '.join(detector.kinds)}", ""]
        lines += _as_markdown(inspect.getdoc(detector) or "")
    return "\n".join(lines) + "\n"


def reference() -> str:
    """Tables of commands, options and faults."""
    return "\n".join(
        [
            "# Reference",
            "",
            _NOTICE,
            "",
            "## Options of `attach`",
            "",
            "Argument before environment variable before default.",
            "",
            *_table(
                ("option", "variable", "default", "meaning"),
                ((f"`{o.name}`", f"`{o.variable}`", _default(o.default), o.help) for o in OPTIONS),
            ),
            "",
            "## Commands",
            "",
            "`rankscope COMMAND --help` lists the arguments.",
            "",
            *_table(
                ("command", "does", "needs"),
                (
                    (f"`rankscope {c.name}`", c.help, f"`rankscope[{c.extra}]`" if c.extra else "-")
                    for c in COMMANDS
                ),
            ),
            "",
            "## Faults of the demo",
            "",
            "`rankscope demo --fault NAME`; the seed decides rank, step and tensor.",
            "",
            *_faults(),
            "",
        ]
    )


def readme() -> str:
    """The README with its table of faults as it has to be."""
    text = README.read_text(encoding="utf-8")
    begin, end = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return "".join([before, begin, "\n".join(_faults()), "\n", end, after])


PAGES: dict[Path, Callable[[], str]] = {
    README: readme,
    DOCS / "detectors.md": detectors,
    DOCS / "reference.md": reference,
}


def main() -> None:
    """Writes every page."""
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(README.parent)}\n")


def _faults() -> list[str]:
    return _table(
        ("fault", "what happens", "where", "expected alert", "which names"),
        (
            (
                f"`{f.name}`" + (" (default)" if f.name == DEFAULT_FAULT else ""),
                f.what,
                f.where,
                " or ".join(f"`{kind}`" for kind in f.kinds) or "none",
                _named(f.names_rank, f.names_tensor, f.tolerance) if f.kinds else "-",
            )
            for f in FAULTS.values()
        ),
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {line} |" for line in lines]


def _anchor(kind: str) -> str:
    return kind.replace(".", "-").replace("_", "-")


def _default(default: object) -> str:
    if callable(default):
        return "a folder under the user's cache folder"
    return "none" if default is None else f"`{default}`"


def _named(rank: bool, tensor: bool, tolerance: int) -> str:
    step = "the very step" if tolerance == 0 else f"the step, within {tolerance}"
    return ", ".join(["the rank"] * rank + [step] + ["the tensor"] * tensor)


def _as_markdown(docstring: str) -> list[str]:
    """A google-style docstring: sections become headings, and lose their indent."""
    lines: list[str] = []
    for line in docstring.splitlines():
        if line.endswith(":") and line[:-1].istitle() and not line.startswith(" "):
            lines += [f"### {line[:-1]}", ""]
        else:
            lines.append(line.removeprefix("    "))
    return lines


if __name__ == "__main__":
    main()
