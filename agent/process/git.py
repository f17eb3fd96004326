"""Which commit a folder is at, read off the repository's files; what it has beyond it, by git."""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_MAX_REFERENCES = 100_000
_MAX_LINKS = 5
# A difference takes a second or two in large repositories.
_SECONDS = 10.0


def commit_of(folder: Path) -> str:
    """The commit that is checked out around `folder`; empty where none can be read.

    Knows worktrees and submodules. What has been changed since the commit is not read.
    """
    try:
        for parent in (folder, *folder.parents):
            entry = parent / ".git"
            if entry.exists():
                return _head(entry)
    except (OSError, ValueError):
        # Not readable, or no text: there is nothing to say.
        return ""
    return ""


def diff_of(folder: Path, *, most: int) -> str:
    """What tracked files around `folder` have that their commit has not; empty where git says none.

    git is told to run no external diff and no conversion; filters of files (`git lfs`) it runs.
    What takes longer than some seconds, as on a file system that hangs, is given up.

    Args:
        most: characters that are read of it.
    """
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "diff", "HEAD"]
    command += ["--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short"]
    try:
        with subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as git:
            assert git.stdout is not None
            timer = threading.Timer(_SECONDS, git.kill)
            timer.daemon = True
            timer.start()
            found = git.stdout.read(most)
            timer.cancel()
            git.kill()  # where there is more: it would wait for somebody who reads
    except OSError:
        return ""  # no git here
    return found.decode("utf-8", "replace").replace("\0", "")


def _head(entry: Path) -> str:
    repository = entry
    if entry.is_file():
        # A worktree's or a submodule's: a file that says where.
        target = entry.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        repository = entry.parent / target
    common = repository
    if (repository / "commondir").is_file():
        common = repository / (repository / "commondir").read_text(encoding="utf-8").strip()
    value = (repository / "HEAD").read_text(encoding="utf-8").strip()
    for _ in range(_MAX_LINKS):
        if not value.startswith("ref:"):
            break
        value = _reference(value.removeprefix("ref:").strip(), repository, common)
    return value if _COMMIT.fullmatch(value) else ""


def _reference(name: str, repository: Path, common: Path) -> str:
    for place in (repository, common):
        path = place / name
        if path.is_file():
            return path.read_text(encoding="utf-8").strip()
    packed = common / "packed-refs"
    if not packed.is_file():
        return ""
    with packed.open(encoding="utf-8") as lines:
        for _, line in zip(range(_MAX_REFERENCES), lines, strict=False):
            commit, _, reference = line.strip().partition(" ")
            if reference == name:
                return commit
    return ""
