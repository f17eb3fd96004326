"""Hooks of mkdocs: what the site has beyond the pages, and scripts that the server's rules allow.

The server sends a Content-Security-Policy by which no script in a page runs, so that a
hostile name of a metric has nowhere to run. The theme writes short scripts into each page: they
become files.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# What the pages lead to beside them, and where it stands in the site.
BESIDE = {"SECURITY.md": "security.md", "README.md": "index.md"}
# Folders of programs, and where they stand in the site.
_PROGRAMS = {"tests/stacks/jobs": "stacks/jobs", "examples": "examples"}
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def on_config(config: Any) -> Any:
    """Fills in the lists of kinds and stacks, which nobody has to keep by hand."""
    docs = Path(config["docs_dir"])
    lists = {
        name: [f"{folder}/{path.name}" for path in sorted((docs / folder).glob("*.md"))]
        for name, folder in (("KINDS", "kinds"), ("STACKS", "stacks"))
    }
    lists["STACKS"].remove("stacks/README.md")

    def filled(item: Any) -> Any:
        if isinstance(item, list):
            return [filled(one) for one in item]
        if isinstance(item, dict):
            return {title: filled(below) for title, below in item.items()}
        return lists.get(item, item)

    config["nav"] = filled(config["nav"])
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds what is kept elsewhere in the repository."""
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "security.md", content=security))
    for folder, place in _PROGRAMS.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            # As text: a browser would offer to save Python.
            name = f"{place}/{path.stem}.txt"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/ lead to the copies in the site."""
    here = posixpath.dirname(page.file.src_uri)

    def inside(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", here, found[1]))
        if target in BESIDE:
            return f"]({posixpath.relpath(BESIDE[target], here or '.')}{found[2]}"
        if (place := _PROGRAMS.get(posixpath.dirname(target))) is not None:
            copy = f"{place}/{Path(target).stem}.txt"
            return f"]({posixpath.relpath(copy, here or '.')}{found[2]}"
        return found[0]

    return re.sub(r"\]\(((?:\.\./)+[^)#\s]+)([)#])", inside, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Moves scripts out of the page."""
    site = Path(config["site_dir"])

    def moved(found: re.Match[str]) -> str:
        return _as_file(found[1], site, page.url)

    return _INLINE.sub(moved, output)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for pages that belong to no Markdown file (404.html)."""
    if not template_name.endswith(".html"):
        return output_content
    site = Path(config["site_dir"])
    return _INLINE.sub(lambda found: _as_file(found[1], site, ""), output_content)


def _as_file(script: str, site: Path, url: str) -> str:
    name = f"assets/page/{hashlib.sha256(script.encode()).hexdigest()[:16]}.js"
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    (site / name).write_text(script, encoding="utf-8")
    folder = url if url.endswith("/") else posixpath.dirname(url)
    return f'<script src="{posixpath.relpath(name, folder or ".")}"></script>'
