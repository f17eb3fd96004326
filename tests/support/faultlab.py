"""The fault lab, for tests: benchmarks are no part of the installed package."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

if str(REPOSITORY) not in sys.path:
    # Last: nothing of the repository's top may hide an installed module.
    sys.path.append(str(REPOSITORY))

case = importlib.import_module("tests.lab.faults.case")
lab = importlib.import_module("tests.lab.faults.lab")
scoring = importlib.import_module("tests.lab.faults.score")
CASES = importlib.import_module("tests.lab.faults.families").REGISTRY.cases
results = importlib.import_module("tests.lab.faults.results")


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
