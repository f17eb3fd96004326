"""A test that trains a few steps on two processes, and fails where Rankscope finds something.

    pytest examples/ci/test_training.py

No server is needed: the fixture `rankscope_run`, which `pip install rankscope[server]` brings,
starts one for the tests. `--rankscope-server URL` posts to another, where the pages stay.
"""

import subprocess
import sys
from pathlib import Path

TRAINING = Path(__file__).parent.parent / "train_ddp.py"


def test_training_is_healthy(rankscope_run):
    """150 steps on handwritten digits, and nothing of them is suspicious."""
    # Its environment has the server and the run: the agent in the script posts to them.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, TRAINING, "--steps", "150"], check=True, timeout=240)
    rankscope_run.check()
