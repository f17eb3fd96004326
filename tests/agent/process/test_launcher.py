"""Every rank finds its place in the job by what its launcher says."""

from __future__ import annotations

import json

import pytest

from tests.support.launchers import (
    HOROVOD,
    JSRUN,
    MPI,
    MVAPICH,
    OPENMPI,
    PLAIN,
    SLURM,
    torchrun,
    who,
)


@pytest.mark.parametrize(
    ("environ", "launcher", "attempt"),
    [
        (torchrun(5, local=1, nodes=2, world=8, rendezvous="x", restart=2), "torchrun", 2),
        (OPENMPI, "openmpi", None),
        (SLURM, "slurm", 3),
        (MPI, "mpi", None),
        (MVAPICH, "mpi", None),
        (JSRUN, "mpi", None),
        (HOROVOD, "horovod", None),
        (PLAIN, "environment", None),
        ({**PLAIN, "RAY_JOB_ID": "01000000"}, "ray", None),
    ],
)
def test_the_place_is_read_off_the_launcher(
    environ: dict[str, str], launcher: str, attempt: int | None
) -> None:
    found = who(environ)

    assert (found.rank, found.local_rank, found.world_size) == (5, 1, 8)
    assert (found.launcher, found.attempt, found.fresh) == (launcher, attempt, False)
    assert found.run


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        (torchrun(0, restart=1) | {"TORCHELASTIC_MAX_RESTARTS": "3"}, 2),
        (torchrun(0, restart=3) | {"TORCHELASTIC_MAX_RESTARTS": "3"}, 0),
        # Nodes that come and go make a job start again beyond that.
        (torchrun(0, restart=4) | {"TORCHELASTIC_MAX_RESTARTS": "3"}, 0),
        (torchrun(0), None),
        (SLURM, None),
    ],
)
def test_how_often_the_launcher_starts_the_job_again(
    environ: dict[str, str], left: int | None
) -> None:
    assert who(environ).restarts_left == left


@pytest.mark.parametrize(
    ("inner", "outer", "launcher"),
    [
        (torchrun(5, local=1, nodes=2, world=8, rendezvous="x"), {**SLURM, "SLURM_PROCID": "1"},
         "torchrun"),
        (HOROVOD, {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "horovod"),
        (OPENMPI, {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "openmpi"),
        (MPI, {**SLURM, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "mpi"),
        ({**PLAIN, "RANK": "9"}, SLURM, "slurm"),
    ],
)  # fmt: skip
def test_the_inner_launcher_wins(
    inner: dict[str, str], outer: dict[str, str], launcher: str
) -> None:
    found = who({**inner, **outer} if launcher == "slurm" else {**outer, **inner})

    assert (found.launcher, found.rank, found.world_size) == (launcher, 5, 8)


def test_slurm_with_pmi_is_slurm() -> None:
    assert who({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "slurm"


@pytest.mark.parametrize(
    ("task", "rank"),
    [(("chief", 0), 0), (("worker", 0), 1), (("worker", 1), 2), (("ps", 0), 3)],
)
def test_tensorflow_counts_chief_workers_and_servers(task: tuple[str, int], rank: int) -> None:
    cluster = {"worker": ["a:1", "b:1"], "ps": ["c:1"], "chief": ["d:1"]}
    config = {"cluster": cluster, "task": {"type": task[0], "index": task[1]}}

    found = who({"TF_CONFIG": json.dumps(config)})

    assert (found.rank, found.world_size, found.launcher) == (rank, 3, "tf_config")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"cluster": {}}', '{"cluster": {"worker": 3}, "task": 4}',
     '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}'],
)  # fmt: skip
def test_a_broken_tf_config_is_left_to_tensorflow(text: str) -> None:
    assert who({"TF_CONFIG": text}).launcher == ""


@pytest.mark.parametrize(
    "environ",
    [
        {**torchrun(0), "RANK": "zero"},
        {**torchrun(0), "WORLD_SIZE": ""},
        {"RANK": "-1", "WORLD_SIZE": "4"},
        {"RANK": "\u0663", "WORLD_SIZE": "4"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
    ],
)
def test_what_is_no_launcher_is_none(environ: dict[str, str]) -> None:
    environ.pop("LOCAL_WORLD_SIZE", None)

    assert who(environ).fresh


def test_a_process_group_is_believed_before_the_environment() -> None:
    found = who(torchrun(0, world=1), torch_distributed=lambda: (3, 16))

    assert (found.rank, found.world_size) == (3, 16)


def in_group(group: int, rank: int, lighthouse: str = "http://node-1:29510") -> dict[str, str]:
    """The rank of a replica group of torchft's, two of four ranks each."""
    own = torchrun(rank, rendezvous=f"launch-of-group-{group}")
    shared = {"NUM_REPLICA_GROUPS": "2", "TORCHFT_LIGHTHOUSE": lighthouse}
    return {**own, **shared, "REPLICA_GROUP_ID": str(group)}


def test_replica_groups_are_one_job() -> None:
    found = [who(in_group(g, r)) for g in range(2) for r in range(4)]

    assert [(i.rank, i.local_rank, i.world_size) for i in found] == [
        (rank, rank % 4, 8) for rank in range(8)
    ]
    assert {i.launcher for i in found} == {"torchft"}
    assert len({i.run for i in found}) == 1
    assert all("RANKSCOPE_RUN" in i.warning for i in found)
    assert who(in_group(0, 0, "http://node-1:4711")).run != found[0].run


def test_the_process_group_of_a_replica_group_is_not_the_job() -> None:
    found = who(in_group(1, 2), torch_distributed=lambda: (2, 4))

    assert (found.rank, found.world_size) == (6, 8)


def test_a_process_group_of_one_says_nothing() -> None:
    found = who(PLAIN, torch_distributed=lambda: (0, 1))

    assert (found.rank, found.world_size) == (5, 8)
