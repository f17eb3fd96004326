"""Starts an elastic job of torchrun's on two "nodes" of two ranks, of which one leaves or joins.

    elastic.py leaves|joins SCRIPT STACK FACTS

Each case is a job of its own: a process that torchrun starts again begins its script anew. What
goes on when is the trainer's: when it has written the file `reached`, the second node is taken
away as a cloud takes one back (SIGTERM to its torchrun), or comes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import ForkProcess as Process
from pathlib import Path

from torch.distributed import run as torchrun

from rankscope.server.demo.processes import free_port

# A restart has to wait until the node that is gone counts as gone: as short as a busy machine
# bears, whose agents are late with their own heartbeats.
_RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=6"
_PATIENCE = 300.0
# While one waits for its restart, another has the processors.
_AT_ONCE = 2
_ENDED = object()
_FORKING = multiprocessing.get_context("fork")


def main() -> int:
    """0 where all ended well."""
    change, script, stack, facts = sys.argv[1:]
    # Whoever ends this ends its nodes with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    case_facts = json.loads(Path(facts).read_text(encoding="utf-8"))
    folder = Path(case_facts["folder"])
    job = f"tests.stacks.jobs.{stack}"
    waiting = []
    for case in importlib.import_module(job).CASES:
        if case_facts["only"] in ("", case.id):
            own = folder / case.id
            own.mkdir()
            plain = {**case_facts, "only": case.id, "folder": str(own)}
            (own / "facts.json").write_text(json.dumps(plain), encoding="utf-8")
            script_of_case = (script, stack, str(own / "facts.json"))
            waiting.append(
                (own, _job(change, f"{case_facts['prefix']}-{case.id}", own, script_of_case))
            )
    folders = [own for own, _ in waiting]
    running: list[Iterator[None]] = []
    with contextlib.ExitStack() as ends:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                running.append(ends.enter_context(contextlib.closing(waiting.pop(0)[1])))
            # Each goes on until it has to wait; it says so by a value.
            running = [one for one in running if next(one, _ENDED) is not _ENDED]
            time.sleep(0.05)
    cases = [c for own in folders for c in json.loads((own / "cases.json").read_text("utf-8"))]
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    return 0


def _job(change: str, run: str, folder: Path, script: tuple[str, ...]) -> Iterator[None]:
    """One elastic job, from its first rank to its last; it yields while it waits.

    Args:
        run: the rendezvous' id, and so the run's.

    Raises:
        RuntimeError: it failed, or did not get on.
    """
    reached = folder / "reached"
    deadline = time.monotonic() + _PATIENCE
    node = functools.partial(_node, run, free_port(), script)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(node(hosts=True))
        second = None if change == "joins" else stack.enter_context(node(hosts=False))
        while first.exitcode is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{run}: not done after {_PATIENCE:.0f} s")
            if reached.exists():
                reached.unlink()
                if second is None:
                    second = stack.enter_context(node(hosts=False))
                else:
                    second.terminate()
            yield
        if first.exitcode:
            raise RuntimeError(f"{run}: the first node ended with {first.exitcode}")
        if change == "joins":
            while second is not None and second.exitcode is None and time.monotonic() < deadline:
                yield
            if second is None or second.exitcode:
                raise RuntimeError(f"{run}: the second node did not come, or failed")


@contextlib.contextmanager
def _node(run: str, port: int, script: tuple[str, ...], *, hosts: bool) -> Iterator[Process]:
    """One torchrun with two ranks: it ends with the block, and its ranks with it.

    All of its processes are forks of this one: to import what they need costs more than the job.
    """
    options = (
        *("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--local-addr=127.0.0.1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={run}"),
        f"--rdzv-conf={_RENDEZVOUS},is_host={int(hosts)}",
        *("--start-method=fork", "--run-path"),
    )
    node = _FORKING.Process(target=_torchrun, args=((*options, *script), hosts))
    node.start()
    try:
        yield node
    finally:
        if node.exitcode is None:
            node.terminate()
            node.join(20)
        if node.exitcode is None:
            node.kill()  # its ranks learn from the system that it is gone
            node.join()


def _torchrun(arguments: tuple[str, ...], hosts: bool) -> None:
    os.environ["ELASTIC_NODE"] = "0" if hosts else "1"
    # Else the ranks of all attempts share one store, where they find the addresses of ranks that
    # are gone: gloo then fails to connect in every other restart.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torchrun.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main())
