"""What launchers leave in the environment of ranks, and the processes of machines around these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rankscope.agent.launcher import Identity, Surroundings, identify
from rankscope.agent.process.ancestry import Process

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
