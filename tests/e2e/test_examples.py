"""The examples train, and a healthy run of each opens no warning."""

import os
import subprocess

import pytest

from tests.support.jobs.ranks import REPOSITORY, TORCHRUN
from tests.support.servers.service import Service

EXAMPLES = {
    "train_fsdp2": 2,
    "train_accumulation": 2,
    "train_manual": 2,
    "train_local_sgd": 2,
    "train_parameter_server": 3,
    "train_tensorboard": 2,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as running:
        yield running


def trained(script, ranks, folder, **environment):
    """Trains an example in a folder."""
    done = subprocess.run(
        [
            TORCHRUN,
            "--standalone",
            f"--nproc-per-node={ranks}",
            REPOSITORY / "examples" / f"{script}.py",
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_its_plain_version_and_lines_of_ours(name):
    def lines(script):
        text = (REPOSITORY / "examples" / f"{script}.py").read_text(encoding="utf-8")
        return [line for line in text.splitlines() if line.strip()]

    ours = [line for line in lines(name) if line.endswith("# rankscope")]
    assert 2 <= len(ours) <= 6
    assert [line for line in lines(name) if line not in ours] == lines(f"{name}_plain")


@pytest.mark.e2e
@pytest.mark.parametrize("name", EXAMPLES)
def test_with_the_agent_its_ranks_are_there_and_well(name, service, tmp_path):
    run = name.replace("_", "-")
    trained(name, EXAMPLES[name], tmp_path, RANKSCOPE_SERVER=service.url, RANKSCOPE_RUN=run)
    assert service.wait_for_state(run, "finished")["world_size"] == EXAMPLES[name]
    assert service.alerts(run) == []
    if name == "train_tensorboard":
        assert list(tmp_path.rglob("runs/ranks/**/events*"))
        assert list(tmp_path.rglob("runs/trainer/events*"))
