"""A virtual environment for each peer, made once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
# Of this project's own environment.
OWN = ("rankscope", "tensorboard")
# A build of a package that has no wheel for the machine may take long.
_INSTALL_SECONDS = 1800.0


class NotInstalled(Exception):
    """The peer is not there; the message says why."""


def pins(requirements: Path = REQUIREMENTS) -> dict[str, str]:
    """Name of each peer -> what pip installs."""
    lines = [line.strip() for line in requirements.read_text(encoding="utf-8").splitlines()]
    return {line.partition("==")[0]: line for line in lines if line and not line.startswith("#")}


def python_of(peer: str, folder: Path) -> Path:
    """The Python that has the peer; installs it where it is not there.

    Args:
        folder: holds the environments.

    Raises:
        NotInstalled: it cannot be installed here.
    """
    if peer in OWN:
        return Path(sys.executable)
    pin = pins()[peer]
    home = folder / pin.replace("==", "-")
    python, stamp = home / "bin" / "python", home / "installed"
    if stamp.exists():
        return python
    sys.stderr.write(f"installing {pin} into {home} ...\n")
    shutil.rmtree(home, ignore_errors=True)
    _call([sys.executable, "-m", "venv", str(home)])
    quiet = ("--quiet", "--disable-pip-version-check")
    _call([str(python), "-m", "pip", "install", *quiet, pin])
    stamp.touch()
    return python


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"not installed after {_INSTALL_SECONDS:.0f} s") from None
    if done.returncode:
        stderr_lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in stderr_lines if "ERROR" in line]
        raise NotInstalled(
            "does not install: " + (errors or stderr_lines or ["no reason given"])[-1][:300]
        )
