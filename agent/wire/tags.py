"""Tags of a run: short words by which people find runs again, such as `nightly` or `ablation-3`.

The agent names them among the facts of its hello (`config["tags"]`); whoever works with the server
changes them afterwards.
"""

from __future__ import annotations

from typing import Any

# A word is read at a glance; the longest name that the database has as a key is as long.
LONGEST = 64
# More than a person gives one run: all of them stand on its line in the list.
MOST = 32


def problem_of(tag: object) -> str | None:
    """What is wrong with a tag, as the end of a sentence; None where nothing is."""
    if not isinstance(tag, str):
        return f"must be text, not {type(tag).__name__}"
    # Commas separate them where several are one text, in an environment variable.
    if not 1 <= len(tag) <= LONGEST or not tag.isprintable() or tag != tag.strip() or "," in tag:
        return f"must be 1 to {LONGEST} printable characters, no comma and no outer spaces"
    return None


def of_config(config: Any) -> tuple[str, ...]:
    """The tags that a hello's facts name, each once, by name; what is no tag is left out."""
    named = config.get("tags") if isinstance(config, dict) else None
    if not isinstance(named, list | tuple):
        return ()
    return tuple(sorted({tag for tag in named if problem_of(tag) is None})[:MOST])
