"""Who this process is in its job: read off what the launcher left in the environment.

Every rank has to come to the same run id without talking to the others. So the id is what the
launcher or its user gave; else, on one machine, made of the process that launched all ranks (a
restart by it keeps the id, a second launch gets another); else of what the nodes share.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rankscope.agent.process import run_id
from rankscope.agent.process.ancestry import Read, launching_process, read_process

# Rank, number of ranks, and both on this machine, as other MPI launchers than Open MPI's say them:
# MPICH's, Intel's and Cray's through PMI, MVAPICH2's, and IBM's jsrun.
_MPI = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *(
        tuple(prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        for prefix in ("MV2_COMM_WORLD_", "JSM_NAMESPACE_")
    ),
)
_NO_STEP = 0xFFFFFFF0  # SLURM numbers its own steps (batch script, interactive shell) from there


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Place of this process in the job.

    Attributes:
        run: run id, the same on every rank of the job.
        attempt: how often the launcher restarted the job; None where it does not say.
        restarts_left: how often it still will; None where it does not say.
        launcher: `torchrun`, `torchft`, `slurm`, `openmpi`, `mpi`, `horovod`, `tf_config`, `ray`,
            `environment` (plain RANK and WORLD_SIZE), `processes` (a process group and nothing
            else) or empty.
        fresh: the id was made up here, because neither user nor launcher gave one.
        warning: what the user should know about the run id, or empty.
    """

    run: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int | None = None
    restarts_left: int | None = None
    launcher: str = ""
    fresh: bool = False
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What one launcher says.

    Attributes:
        run: its own id of the job, where it has one.
        one_node: all ranks run on this machine.
        marks: variables that it gives to each rank.
        shared: facts that are the same on every rank, and as good as unique to this launch.
        reused: facts that are the same on every rank, but may be so in the next launch, too.
        grouped: the ranks are in several jobs with process groups of their own.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    attempt: int | None = None
    restarts_left: int | None = None
    run: str | None = None
    one_node: bool = False
    marks: frozenset[str] = frozenset()
    shared: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    grouped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The machine around this process, as far as it is examined.

    Attributes:
        boot: text that differs after each start of the machine.
        script: file name of what was started.
    """

    pid: int
    host: str
    boot: str
    script: str
    read: Read = read_process

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = ""
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            boot=boot,
            script=_script_name(sys.argv[0] if sys.argv else ""),
        )


def _script_name(started: str) -> str:
    """File name of what was started; of `python -m package`, the name of the package."""
    path = Path(started)
    return path.parent.name if path.name == "__main__.py" else path.name


def torch_process_group() -> tuple[int, int] | None:
    """Rank and world size of torch's default process group; torch is not imported for it."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def identify(
    environ: Mapping[str, str],
    *,
    run: str | None = None,
    torch_distributed: Callable[[], tuple[int, int] | None] = torch_process_group,
    surroundings: Surroundings | None = None,
    now: datetime | None = None,
) -> Identity:
    """Read rank, world size, attempt and run id off the environment.

    Args:
        environ: the process's variables.
        run: run id that the user chose; beats every other.
        torch_distributed: rank and world size of a process group that is there already. It is
            believed before the environment, which may have been inherited.
        surroundings: those of this process by default.
        now: for a fresh id.
    """
    around = surroundings or Surroundings.here()
    group = torch_distributed()
    found = next((f for read in _LAUNCHERS if (f := read(environ)) is not None), None)
    if found is None and group is not None and group[1] > 1:
        found = _processes(environ, *group)
    if found is None:
        chosen = run or run_id.fresh(now or datetime.now().astimezone(), script=around.script)
        return Identity(run=chosen, fresh=run is None)
    rank, world_size = found.rank, found.world_size
    if group is not None and group[1] > 1 and not found.grouped:
        rank, world_size = group
    local_rank = found.local_rank
    if local_rank is None:
        local_rank = rank if found.one_node else 0
    chosen, warning = (run, "") if run else _run_of(found, environ, around)
    return Identity(
        run=chosen,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        attempt=found.attempt,
        restarts_left=found.restarts_left,
        launcher=found.launcher,
        warning=warning,
    )


def _run_of(found: _Found, environ: Mapping[str, str], around: Surroundings) -> tuple[str, str]:
    """The run id, and a warning where it may be that of another launch as well."""
    if found.run is not None:
        return run_id.from_launcher(found.run), ""
    if found.one_node:
        launcher = launching_process(around.pid, found.marks, around.read)
        if launcher is not None:
            started = (around.host, around.boot, str(launcher.pid), str(launcher.started))
            # A launcher of the trainer's own may launch several jobs in its life, torchrun does
            # not, and may change the port when it restarts one.
            more = () if found.launcher == "torchrun" else (*found.shared, *found.reused)
            return run_id.derived(*started, *more), ""
    batch_job = next((environ[name] for name in _BATCH_JOBS if environ.get(name)), None)
    if batch_job is not None:
        return run_id.derived(batch_job, *found.shared, *found.reused, around.script), ""
    if found.shared:
        return run_id.derived(*found.shared, *found.reused, around.script), ""
    # One pod of a Kubernetes job calls itself localhost where the others call it by its name.
    reused = (around.host if fact and _is_local(fact) else fact for fact in found.reused)
    made = run_id.derived(*reused, around.script, str(found.world_size))
    return made, (
        f"run id {made!r} is made of the master's address, the script and the number of ranks; a "
        "second job with the same ones gets the same id. Set RANKSCOPE_RUN to one id for each job"
    )


# ---------------------------------------------------------------------------------------- launchers


def _torchrun(environ: Mapping[str, str]) -> _Found | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    attempt = _number(environ, "TORCHELASTIC_RESTART_COUNT")
    most = _number(environ, "TORCHELASTIC_MAX_RESTARTS")
    given = environ["TORCHELASTIC_RUN_ID"]
    one_node = _number(environ, "GROUP_WORLD_SIZE") == 1
    if given in ("", "none"):
        # One step of SLURM may start a job of its own on each of its nodes.
        chosen = None if one_node else _slurm_step(environ)
    else:
        chosen = given
    return _Found(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK"),
        attempt=attempt,
        restarts_left=None if attempt is None or most is None else max(0, most - attempt),
        run=chosen,
        one_node=one_node,
        marks=frozenset({"TORCHELASTIC_RUN_ID"}),
        reused=_master(environ),
    )


def _torchft(environ: Mapping[str, str]) -> _Found | None:
    """Each replica group is a job of torchrun's: what they share is the lighthouse."""
    group, groups = _number(environ, "REPLICA_GROUP_ID"), _number(environ, "NUM_REPLICA_GROUPS")
    inside = _torchrun(environ)
    if group is None or groups is None or inside is None:
        return None
    return _Found(
        launcher="torchft",
        rank=group * inside.world_size + inside.rank,
        world_size=groups * inside.world_size,
        local_rank=inside.local_rank,
        attempt=inside.attempt,
        # Its port is the same in every launch, unless its user chose another.
        reused=(environ.get("TORCHFT_LIGHTHOUSE", ""),),
        grouped=True,
    )


def _horovod(environ: Mapping[str, str]) -> _Found | None:
    rank, world_size = _number(environ, "HOROVOD_RANK"), _number(environ, "HOROVOD_SIZE")
    if rank is None or world_size is None:
        return None
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return _Found(
        launcher="horovod",
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "HOROVOD_LOCAL_RANK"),
        one_node=_number(environ, "HOROVOD_LOCAL_SIZE") == world_size,
        marks=frozenset({"HOROVOD_RANK"}),
        # The driver listens on a port that the system chose for this launch.
        shared=(address, port) if address and port else (),
    )


def _openmpi(environ: Mapping[str, str]) -> _Found | None:
    rank = _number(environ, "OMPI_COMM_WORLD_RANK")
    world_size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return _Found(
        launcher="openmpi",
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        one_node=_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == world_size,
        marks=frozenset({"OMPI_COMM_WORLD_RANK"}),
        shared=tuple(environ[name] for name in names if environ.get(name)),
        reused=_master(environ),
    )


def _slurm(environ: Mapping[str, str]) -> _Found | None:
    rank = _number(environ, "SLURM_PROCID")
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    if world_size is None:
        world_size = _number(environ, "SLURM_NTASKS")
    if rank is None or world_size is None or not environ.get("SLURM_JOB_ID"):
        return None
    step = _slurm_step(environ)
    if step is None and world_size == 1:
        return None  # a plain process in a batch script, which may start several in turn
    pmi_size = _number(environ, "PMI_SIZE")
    if pmi_size is not None and pmi_size != world_size:
        return None  # MPICH's launcher started its one process a node by srun
    return _Found(
        launcher="slurm",
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        attempt=_number(environ, "SLURM_RESTART_COUNT"),
        run=step or f"slurm-{environ['SLURM_JOB_ID']}",
    )


def _mpi(environ: Mapping[str, str]) -> _Found | None:
    for names in _MPI:
        rank, world_size, local_rank, local_size = (_number(environ, name) for name in names)
        if rank is None or world_size is None:
            continue
        return _Found(
            launcher="mpi",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            one_node=local_size == world_size,
            marks=frozenset(names[:1]),
            reused=_master(environ),
        )
    return None


def _tf_config(environ: Mapping[str, str]) -> _Found | None:
    try:
        plain = json.loads(environ.get("TF_CONFIG", ""))
        cluster, task = plain["cluster"], plain["task"]
        roles = [role for role in ("chief", "master", "worker", "ps") if role in cluster]
        addresses = [str(a) for role in roles for a in cluster[role]]
        training = sum(len(cluster[role]) for role in roles if role != "ps")
        before = roles[: roles.index(task["type"])]
        rank = sum(len(cluster[role]) for role in before) + int(task["index"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # TensorFlow itself complains about it in better words
    return _Found(
        launcher="tf_config",
        rank=rank,
        world_size=max(1, training),
        one_node=all(_is_local(a.rsplit(":", 1)[0]) for a in addresses),
        marks=frozenset({"TF_CONFIG"}),
        reused=tuple(addresses),
    )


def _ray(environ: Mapping[str, str]) -> _Found | None:
    if not environ.get("RAY_JOB_ID"):
        return None
    found = _environment(environ)
    if found is None:
        return None
    # Ray Train sets the same variables as torchrun, with a port that is free at that moment.
    shared = (environ["RAY_JOB_ID"], *found.reused) if environ.get("MASTER_PORT") else ()
    return _Found(
        launcher="ray",
        rank=found.rank,
        world_size=found.world_size,
        local_rank=found.local_rank,
        shared=shared,
        reused=(environ["RAY_JOB_ID"],),
    )


def _environment(environ: Mapping[str, str]) -> _Found | None:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None or world_size is None or world_size < 2:
        return None
    on_this_node = _number(environ, "LOCAL_WORLD_SIZE")
    # In Kubernetes `localhost` may be what one of several pods calls itself.
    here = _is_local(environ.get("MASTER_ADDR", "")) and "KUBERNETES_SERVICE_HOST" not in environ
    return _Found(
        launcher="environment",
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK"),
        one_node=here if on_this_node is None else on_this_node == world_size,
        marks=frozenset({"RANK", "LOCAL_RANK"}),
        reused=_master(environ),
    )


def _processes(environ: Mapping[str, str], rank: int, world_size: int) -> _Found:
    return _Found(
        launcher="processes",
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK"),
        one_node=_is_local(environ.get("MASTER_ADDR", "")),
        marks=frozenset({"RANK", "LOCAL_RANK"}),
        reused=_master(environ),
    )


# The order matters: what is started inside an allocation or by another launcher inherits the
# variables around it, so the innermost launcher comes first.
_LAUNCHERS: tuple[Callable[[Mapping[str, str]], _Found | None], ...] = (
    _torchft,
    _torchrun,
    _horovod,
    _openmpi,
    _slurm,
    _mpi,
    _tf_config,
    _ray,
    _environment,
)

_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def _slurm_step(environ: Mapping[str, str]) -> str | None:
    job, step = environ.get("SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    return None if not job or step is None or step >= _NO_STEP else f"slurm-{job}.{step}"


def _master(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))


def _is_local(host: str) -> bool:
    return host in ("", "localhost", "::1", "[::1]") or host.startswith("127.")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """A variable that is a number from 0; None where it is not there or is none."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else None
