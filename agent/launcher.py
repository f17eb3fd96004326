"""Who this process is in its job: read off what the launcher left in the environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Place of this process in the job.

    Attributes:
        run: run id, the same on every rank of the job.
        attempt: how often the launcher restarted the job; None where it does not say.
        launcher: `torchrun`, `slurm`, `openmpi`, `horovod`, `tf_config`, ... or empty.
        fresh: the id was made up here, because neither user nor launcher gave one.
    """

    run: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int | None = None
    launcher: str = ""
    fresh: bool = False
