"""All ranks of a job find the same run id without talking to each other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote

import pytest

from rankscope.agent.launcher import Identity, Surroundings
from rankscope.agent.process import run_id
from rankscope.agent.process.ancestry import Process
from rankscope.agent.wire import MAX_NAME_LENGTH
from tests.support.launchers import (
    AGENT,
    AROUND,
    COMMAND,
    HOROVOD,
    MPI,
    OPENMPI,
    PLAIN,
    SHELL,
    SLURM,
    machine,
    ranks,
    torchrun,
    who,
)

READABLE = re.compile(r"[a-z]+-[a-z]+-[0-9a-f]{8}")


def test_the_users_id_beats_all() -> None:
    found = who(torchrun(1, rendezvous="theirs"), run="ours")

    assert (found.run, found.rank, found.fresh) == ("ours", 1, False)


@pytest.mark.parametrize(
    ("environ", "run"),
    [
        (torchrun(0, rendezvous="exp42"), "exp42"),
        (torchrun(0, rendezvous=" a/b\n"), "a-b-"),
        (SLURM, "slurm-123456.2"),
        ({**SLURM, "SLURM_STEP_ID": "4294967290"}, "slurm-123456"),
        (torchrun(0, nodes=2) | {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}, "slurm-9.0"),
    ],
)
def test_a_launchers_id_is_kept(environ: dict[str, str], run: str) -> None:
    assert who(environ).run == run


def test_a_random_uuid_becomes_readable() -> None:
    given = "2c1f1b8e-6d0f-4b5e-9f57-0d7a5b6f2d11"

    assert READABLE.fullmatch(who(torchrun(0, rendezvous=given)).run)
    assert who(torchrun(0, rendezvous=given)).run == who(torchrun(3, rendezvous=given)).run


def assert_one_id(identities: list[Identity]) -> str:
    runs = {identity.run for identity in identities}
    assert len(runs) == 1, runs
    run = runs.pop()
    assert READABLE.fullmatch(run)
    assert not any(identity.fresh for identity in identities)
    return run


LOCAL_JOBS: dict[str, tuple[Callable[[int], dict[str, str]], str]] = {
    "torchrun": (torchrun, "TORCHELASTIC_RUN_ID RANK"),
    "openmpi": (
        lambda k: {
            "OMPI_COMM_WORLD_RANK": str(k),
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
        "OMPI_COMM_WORLD_RANK",
    ),
    "horovod": (
        lambda k: {
            "HOROVOD_RANK": str(k),
            "HOROVOD_SIZE": "4",
            "HOROVOD_LOCAL_SIZE": "4",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
        },
        "HOROVOD_RANK",
    ),
    "mpi": (
        lambda k: {"PMI_RANK": str(k), "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"},
        "PMI_RANK",
    ),
    "environment": (lambda k: {"RANK": str(k), "WORLD_SIZE": "4"}, "RANK"),
}


@pytest.mark.parametrize("name", LOCAL_JOBS)
def test_ranks_of_one_machine_agree_through_their_launcher(name: str) -> None:
    environ, marks = LOCAL_JOBS[name]
    around = machine(*ranks(4, marks=marks))

    found = [who(environ(k), around(200 + k)) for k in range(4)]

    assert_one_id(found)
    assert [f.local_rank for f in found] == [0, 1, 2, 3]
    assert {f.warning for f in found} == {""}


@pytest.mark.parametrize("name", LOCAL_JOBS)
def test_a_second_launch_gets_another_id(name: str) -> None:
    environ, marks = LOCAL_JOBS[name]
    again = Process(AGENT, SHELL, 9000, COMMAND)

    first = machine(*ranks(4, marks=marks))(200)
    second = machine(*ranks(4, marks=marks), again)(200)

    assert who(environ(0), first).run != who(environ(0), second).run


def test_a_restart_by_the_same_launcher_keeps_the_id() -> None:
    first = machine(*ranks(4, marks="TORCHELASTIC_RUN_ID"))(200)
    later = Process(300, AGENT, 7000, ("python", "train.py"), frozenset({"TORCHELASTIC_RUN_ID"}))
    second = machine(later)(300)

    found = [who(torchrun(0), first), who(torchrun(0, restart=1) | {"MASTER_PORT": "3"}, second)]

    assert_one_id(found)
    assert [f.attempt for f in found] == [0, 1]


def test_wrappers_around_a_rank_are_part_of_it() -> None:
    marks = frozenset({"TORCHELASTIC_RUN_ID"})
    wrappers = [Process(150 + k, AGENT, 1050 + k, ("bash", "-c", "..."), marks) for k in range(4)]
    wrapped = [replace(rank, parent=150 + k) for k, rank in enumerate(ranks(4))]
    wrapped = [replace(rank, variables=marks) for rank in wrapped]
    around = machine(*wrappers, *wrapped)

    assert_one_id([who(torchrun(k), around(200 + k)) for k in range(4)])


def test_copies_of_the_launcher_are_passed_over() -> None:
    # horovodrun forks a middleman for each rank, which starts a shell, which starts the rank.
    agent = ("python", "torchrun", "train.py")
    middlemen = [Process(150 + k, AGENT, 1050 + k, agent) for k in range(2)]
    spawned = [
        Process(
            152 + k, AGENT, 1052 + k, ("python", "-c", "spawn_main()", "--multiprocessing-fork")
        )
        for k in range(2)
    ]
    children = [
        replace(rank, parent=150 + k, variables=frozenset({"HOROVOD_RANK"}))
        for k, rank in enumerate(ranks(4))
    ]
    environ, _ = LOCAL_JOBS["horovod"]
    around = machine(*middlemen, *spawned, *children)

    assert_one_id([who(environ(k), around(200 + k)) for k in range(4)])


def test_a_trainer_that_starts_the_other_ranks_is_the_launcher() -> None:
    zero = Process(200, SHELL, 1100, ("python", "train.py"))
    others = [
        Process(200 + k, 200, 1200 + k, ("python", "/abs/train.py"), frozenset({"LOCAL_RANK"}))
        for k in range(1, 4)
    ]
    around = machine(zero, *others)

    assert_one_id(
        [who({}, around(200 + k), torch_distributed=lambda k=k: (k, 4)) for k in range(4)]
    )


@pytest.mark.parametrize("host", ["", "localhost", "127.0.0.1", "::1"])
def test_a_launcher_of_the_trainers_own_may_launch_several_jobs(host: str) -> None:
    around = machine(*(replace(rank, command=COMMAND) for rank in ranks(2)))  # forked

    def found(rank: int, port: str) -> Identity:
        environ = {"MASTER_ADDR": host, "MASTER_PORT": port}
        return who(environ, around(200 + rank), torch_distributed=lambda: (rank, 2))

    first = assert_one_id([found(0, "4001"), found(1, "4001")])
    second = assert_one_id([found(0, "4002"), found(1, "4002")])
    assert first != second


NODES: dict[str, Callable[[int], dict[str, str]]] = {
    "torchrun": lambda k: torchrun(k, local=k % 2, nodes=2),
    "plain": lambda k: {**PLAIN, "RANK": str(k)},
    "mpi": lambda k: {**MPI, "PMI_RANK": str(k)},
    "tf_config": lambda k: {
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": k}}
        )
    },
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_that_share_no_id_agree_with_a_warning(name: str) -> None:
    found = [who(NODES[name](k), machine(*ranks(2), host=f"node-{k}")(200)) for k in range(2)]

    assert_one_id(found)
    assert all("RANKSCOPE_RUN" in f.warning and f.run in f.warning for f in found)


def test_a_pod_that_calls_itself_localhost_agrees_with_the_others() -> None:
    environ = {**PLAIN, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "job-master-0"}
    master = environ | {"RANK": "0", "MASTER_ADDR": "localhost"}

    assert_one_id(
        [
            who(master, replace(AROUND, host="job-master-0")),
            who(environ, replace(AROUND, host="job-worker-0")),
        ]
    )


@pytest.mark.parametrize(
    "environ",
    [
        {**MPI, "PBS_JOBID": "77.cluster"},
        HOROVOD,
        OPENMPI,
        {**PLAIN, "RAY_JOB_ID": "01000000"},
    ],
)
def test_nodes_that_share_an_id_of_the_launch_need_no_warning(environ: dict[str, str]) -> None:
    found = [who(environ, machine(*ranks(2), host=f"node-{k}")(200)) for k in range(2)]

    assert_one_id(found)
    assert found[0].warning == ""


def test_ranks_that_outlived_their_launcher_still_agree() -> None:
    around = machine(*ranks(4, parent=1, marks="RANK"))
    environ, _ = LOCAL_JOBS["environment"]

    found = [who(environ(k), around(200 + k)) for k in range(4)]

    assert_one_id(found)
    assert found[0].warning


def test_a_single_process_gets_a_fresh_id() -> None:
    found = who({}, now=datetime(2026, 4, 21, tzinfo=UTC))

    assert found.fresh
    assert re.fullmatch(r"train-[a-z]+-[a-z]+-0421-[0-9a-f]{4}", found.run)
    assert (found.rank, found.local_rank, found.world_size, found.launcher) == (0, 0, 1, "")
    assert found.run != who({}).run


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train_vae.py", "train_vae-"),
        ("Fine Tune (v2).py", "Fine-Tune-v2-"),
        ("../../x/ü.py", "x-"),
        ("модель.py", ""),
        ("-c", ""),
        ("", ""),
        ("ipykernel_launcher.py", ""),
        ("a" * 300 + ".py", "a" * 40 + "-"),
    ],
)
def test_a_fresh_id_begins_with_the_name_of_the_script(script: str, name: str) -> None:
    made = run_id.fresh(datetime(2026, 4, 21, tzinfo=UTC), b"\0\0\x3f\x9c", script=script)

    assert made == f"{name}amber-badger-0421-3f9c"
    assert quote(made, safe="") == made
    assert len(made) < MAX_NAME_LENGTH


@pytest.mark.parametrize(
    ("started", "script"),
    [
        ("/srv/train.py", "train.py"),
        ("/srv/trainer/__main__.py", "trainer"),
        ("-c", "-c"),
        ("", ""),
    ],
)
def test_the_script_is_what_was_started(
    started: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [started])

    assert Surroundings.here().script == script


def test_a_fresh_id_leaves_the_trainers_random_numbers_alone() -> None:
    import random

    random.seed(1)
    state = random.getstate()
    who({})

    assert random.getstate() == state


def test_ids_are_distinct() -> None:
    assert len({run_id.derived(str(k)) for k in range(20_000)}) == 20_000
