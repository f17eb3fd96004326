"""The blocks of a page of the documentation, run as they stand, in their order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# What the pages call the server by.
ADDRESS = "http://127.0.0.1:8642"
_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>.+?) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        needs: what it needs that is not here; empty where it is run.
        title: the name of the file that it is.
    """

    language: str
    text: str
    title: str = ""
    needs: str = ""


def blocks(page: str) -> list[Block]:
    """The blocks of a page."""
    return [
        Block(
            found["language"], found["text"], title=found["title"] or "", needs=found["needs"] or ""
        )
        for found in _BLOCK.finditer(page)
    ]


def run(page: str, *, folder: Path, server: str) -> int:
    """Runs a page in a folder; returns the number of commands and scripts that were run.

    A block with a title is written as that file. Shell and Python have to succeed. Each line of
    a `text` block has to be in what the last one printed. What is marked as needing something is
    checked for its syntax alone.

    Raises:
        AssertionError: a block does not do what the page says.
    """
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RANKSCOPE_SERVER": server,
        "RANKSCOPE_ALLOWANCE": "60",
    }
    printed, count = "", 0
    for block in blocks(page):
        text = block.text.replace(ADDRESS, server)
        if block.title:
            (folder / block.title).write_text(text, encoding="utf-8")
        elif block.language == "text":
            for line in text.split("\n"):
                assert line.strip() in printed, f"{line!r} is not in what was printed:\n{printed}"
        elif block.language in ("sh", "python"):
            words = {
                "sh": ["bash", *(["-n"] if block.needs else ["-e", "-u"]), "-c", text],
                "python": [sys.executable, "-c", text],
            }[block.language]
            if block.needs and block.language == "python":
                compile(text, "block", "exec")
                continue
            done = subprocess.run(
                words,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=200,
            )
            printed = done.stdout + done.stderr
            assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
            count += not block.needs
        else:
            raise AssertionError(f"a block in {block.language}: who runs it?")
    return count
