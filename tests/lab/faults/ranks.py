"""The processes of a job: kept alive from case to case, in one gloo group."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rankscope.server.demo.processes import free_port
from tests.lab.faults.case import Setting

# A process is forked from one that has imported everything already: a launch takes no time.
_context = multiprocessing.get_context("forkserver")
_PRELOAD = [
    "torch",
    "torch.distributed",
    "sklearn.datasets",
    "tests.lab.faults.families",
    "tests.lab.drawn.trainer",
]
# A rank whose peer is gone must fail soon. Hangs are cases of their own.
_COLLECTIVE_SECONDS = 60.0


class RankFailed(Exception):
    """A rank ended or raised where it should not have."""


class Ranks:
    """Processes of one job.

    Args:
        world: number of them.
        folder: each rank's output goes there.
        patience: seconds that a collective may take.
    """

    def __init__(self, world: int, folder: Path, *, patience: float = _COLLECTIVE_SECONDS) -> None:
        self.world = world
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": "1",
        }
        _context.set_forkserver_preload(_PRELOAD)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            here, there = _context.Pipe()
            process = _context.Process(
                target=_main, args=(there, rank, own, str(folder), patience), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, case: str, setting: Any, *, timeout: float = 420.0) -> None:
        """Trains one case on all ranks.

        Args:
            case: its id, or `module:function` of (setting, rank).

        Raises:
            RankFailed: a rank raised, ended, or took too long.
        """
        self.begin(case, setting)
        answers = self.answers(timeout)
        failed = {rank: text for rank, text in enumerate(answers) if text != ""}
        if failed:
            rank, text = next(iter(failed.items()))
            raise RankFailed(f"rank {rank}: {text or self.tail(rank)}")

    def begin(self, case: str, setting: Any) -> None:
        """Starts a case on all ranks and does not wait."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((case, setting, rank))

    def answers(self, timeout: float) -> list[str | None]:
        """What each rank ended with: empty for success, None for none (gone, or still at it)."""
        deadline = time.monotonic() + timeout
        answers: list[str | None] = [None] * self.world
        waiting = dict(zip(self._pipes, range(self.world), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    answers[rank] = pipe.recv()
        return answers

    def tail(self, rank: int) -> str:
        """The last line that a rank printed."""
        lines = (self.folder / f"rank{rank}.log").read_text(encoding="utf-8").splitlines()
        return lines[-1] if lines else "said nothing"

    def close(self) -> None:
        """Ends them."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(3.0)
            if process.is_alive():
                process.kill()
                process.join()

    def kill(self) -> None:
        """Ends them at once."""
        for process in self._processes:
            process.kill()
            process.join()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _main(
    pipe: Connection, rank: int, environment: dict[str, str], folder: str, patience: float
) -> None:
    os.environ.update(environment)
    with open(f"{folder}/rank{rank}.log", "a", buffering=1, encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _serve(pipe, patience)
    sys.stdout.flush()
    sys.stderr.flush()
    # A gloo thread may still want the interpreter's lock while the interpreter shuts down.
    os._exit(0)


def _serve(pipe: Connection, patience: float) -> None:
    import torch
    import torch.distributed as dist

    from tests.lab.faults.families import REGISTRY

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    while (order := _next(pipe)) is not None:
        case, setting, rank = order
        # What a case raises ends the process: its group would be out of step anyway.
        module, _, function = case.partition(":")
        if function:
            getattr(importlib.import_module(module), function)(setting, rank)
        else:
            REGISTRY.cases[case](replace(setting, rank=rank)).train()  # type: ignore[attr-defined]
        pipe.send("")


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def launch(
    case: str,
    setting: Setting,
    folder: Path,
    *,
    launches: int,
    timeout: float,
    patience: float = _COLLECTIVE_SECONDS,
) -> list[list[str | None]]:
    """Runs a case in processes of its own, once or several times in turn.

    Returns:
        What each rank of each launch ended with.
    """
    ended: list[list[str | None]] = []
    for number in range(launches):
        ranks = Ranks(setting.world, folder / f"launch{number}", patience=patience)
        try:
            ranks.begin(case, replace(setting, launch=number))
            ended.append(ranks.answers(timeout))
        finally:
            ranks.kill()
    return ended
