"""What real launchers leave to their ranks is read rightly, and their ranks agree on one run."""

import os
import re
import subprocess

import pytest

from tests.support.stacks import ENVIRONMENT, STACKS

pytestmark = [pytest.mark.stacks, pytest.mark.e2e, pytest.mark.timeout(180)]

SAY = """
import os, sys
from rankscope.agent.launcher import identify
i = identify(os.environ)
sys.stdout.write(f"said {i.run} {i.rank} {i.local_rank} {i.world_size} {i.launcher}\\n")
"""
READABLE = re.compile(r"[a-z]+-[a-z]+-[0-9a-f]{8}")

LAUNCHES = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node=3"),
    "horovod": ("horovodrun", "-np", "3", "--gloo", "python"),
    "openmpi": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", "python"),
    "mpi": ("../mpich/bin/mpiexec.hydra", "-n", "3", "python"),
    "tf_config": ("python", str(STACKS / "cluster.py"), "3"),
}


def launch(command, folder):
    """What the ranks said, in the order of their ranks."""
    launcher = ENVIRONMENT / "bin" / command[0]
    script = folder / "say.py"
    script.write_text(SAY, encoding="utf-8")
    done = subprocess.run(
        [launcher, *command[1:], script],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("RANKSCOPE_")},
            "PATH": f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    # Some launchers put the rank before each line.
    said = re.findall(r"said (\S+) (\d+) (\d+) (\d+) (\S+)", done.stdout)
    return sorted(said, key=lambda line: int(line[1]))


@pytest.mark.parametrize("name", LAUNCHES)
def test_ranks_of_a_real_launcher(name, tmp_path):
    first, second = (launch(LAUNCHES[name], tmp_path) for _ in range(2))
    run = first[0][0]
    places = [(run, str(rank), "3", name) for rank in range(3)]
    assert [(line[0], line[1], line[3], line[4]) for line in first] == places
    # Open MPI counts the ranks of a machine in an order of its own.
    assert sorted(line[2] for line in first) == ["0", "1", "2"]
    assert READABLE.fullmatch(run)
    assert {line[0] for line in second} != {run}
