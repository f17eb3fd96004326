"""`start(...)`: the same monitor for trainers that have no torch optimizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.agent.delivery.session import Session
from rankscope.agent.launcher import identify
from rankscope.agent.model.arrays import Arrays
from rankscope.agent.null_monitor import NullMonitor
from rankscope.agent.options import facts_of, resolve
from rankscope.agent.process.resident_memory import memory_limit
from rankscope.agent.process.spawned import in_helper
from rankscope.agent.steps.array_monitor import ArrayMonitor


def start(
    *,
    step: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    parameters: Arrays | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> ArrayMonitor | NullMonitor:
    """Watches a training that the caller reports, step by step, in arrays of any framework.

        monitor = agent.start()
        for batch in data:
            loss, gradients, parameters = train_step(batch)
            monitor.step(loss=loss, gradients=gradients, parameters=parameters)

    Args:
        step: number of steps taken before.
        rank: of this process; read off the launcher if not given.
        world_size: number of ranks; read off the launcher if not given.
        parameters: what holds before the first step.
        config: facts that a person wants to see beside the run; JSON-able. `profile` says what the
            loss is, where it is none that has to fall: one of `wire.PROFILES`.
        **options: as those of `attach`.

    Returns:
        The monitor; one that does nothing with `mode="disabled"`, and in a process that helps the
        trainer's own (a worker that loads data) and imports its script for that.

    Raises:
        TypeError: an option is not known.
        ValueError: an option has an impossible value.
    """
    if step < 0:
        raise ValueError(f"start(step={step!r}): must be a number of steps from 0")
    if (rank is None) is not (world_size is None):
        raise ValueError("start(rank=..., world_size=...): give both or neither")
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"start(rank={rank}, world_size={world_size}): no such rank")
    resolved = resolve(options, os.environ)
    config_facts = facts_of(config, resolved.tags)
    given = None if rank is None or world_size is None else (rank, world_size)
    identity = identify(os.environ, run=resolved.run, torch_distributed=lambda: given)
    if resolved.mode == "disabled" or in_helper():
        return NullMonitor(identity.run, identity.rank)
    facts = {
        # The script's name only: arguments and environment may hold secrets.
        "script": Path(sys.argv[0]).name if sys.argv else "",
        "numpy": np.__version__,
        "python": ".".join(str(n) for n in sys.version_info[:3]),
        "memory_limits": {"process": memory_limit()},
        **config_facts,
    }
    connection = Session(resolved, identity, config=facts)
    return ArrayMonitor(connection=connection, step=step, parameters=parameters)
