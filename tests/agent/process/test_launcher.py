"""Every rank finds its place, and all find the same run id without talking to each other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest

from rankscope.agent.launcher import Identity, Surroundings, identify
from rankscope.agent.process import run_id
from rankscope.agent.process.ancestry import Process
from rankscope.agent.wire import MAX_NAME_LENGTH

READABLE = re.compile(r"[a-z]+-[a-z]+-[0-9a-f]{8}")
SHELL, AGENT = 50, 100
COMMAND = ("python", "torchrun", "train.py")

AROUND = Surroundings(pid=0, host="node-1", boot="b00t", script="train.py", read=lambda pid: None)


def machine(*processes: Process, host: str = "node-1") -> Callable[[int], Surroundings]:
    """A machine with a shell, a launcher and these processes; surroundings by process id."""
    table = {
        1: Process(1, 0, 3, ("/sbin/init",)),
        SHELL: Process(SHELL, 1, 500, ("-bash",)),
        AGENT: Process(AGENT, SHELL, 1000, COMMAND),
        **{p.pid: p for p in processes},
    }
    return lambda pid: replace(AROUND, pid=pid, host=host, read=table.get)


def ranks(count: int, parent: int = AGENT, marks: str = "") -> list[Process]:
    variables = frozenset(marks.split())
    return [
        Process(200 + k, parent, 1100 + k, ("python", "train.py"), variables) for k in range(count)
    ]


def who(environ: Mapping[str, str], around: Surroundings = AROUND, **given: Any) -> Identity:
    given = {"torch_distributed": lambda: None, **given}
    return identify(environ, surroundings=around, **given)


def torchrun(
    rank: int,
    *,
    local: int | None = None,
    nodes: int = 1,
    world: int = 4,
    rendezvous: str = "none",
    restart: int = 0,
) -> dict[str, str]:
    local = rank if local is None else local
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world // nodes),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "127.0.0.1" if nodes == 1 else "node-1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": rendezvous,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
    }


# ------------------------------------------------------------------------------ rank, size, attempt

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node-1-4711@1",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_RESTART_COUNT": "3",
}
MVAPICH, JSRUN = (
    {f"{prefix}_RANK": "5", f"{prefix}_SIZE": "8", f"{prefix}_LOCAL_RANK": "1"}
    for prefix in ("MV2_COMM_WORLD", "JSM_NAMESPACE")
)
MPI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
HOROVOD = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "40123",
}
PLAIN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
}


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


# --------------------------------------------------------------------------------------- the run id


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
