"""The fault lab run as a person would run it."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def ran(folder: Path, *options: str) -> Path:
    """Runs the lab as a person would, with all it writes in a folder.

    Returns:
        Where `results.json`, `table.md` and `lab/lab.db` are.
    """
    written = ("--json", str(folder / "results.json"), "--markdown", str(folder / "table.md"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.lab.faults", *options),
            *("--folder", str(folder / "lab"), *written),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
