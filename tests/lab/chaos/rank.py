"""One rank, a process of its own: takes steps with known losses until it is told to end.

    python -m tests.lab.chaos.rank SERVER SPOOL RUN RANK RANKS SEED FIRST_STEP LEDGER

What it has published stands in the ledger, a step a line, written before the step is reported; and
in the last line, once it has ended in order, what became of it.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
import time
from pathlib import Path

from rankscope import agent
from rankscope.agent.steps.array_monitor import ArrayMonitor


def loss_of(seed: int, rank: int, step: int) -> float:
    """The loss of a step: no other step's, to the last bit."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    return 1.0 + int.from_bytes(digest, "little") / 2**64


def main() -> None:
    """Trains."""
    server, spool, run, rank, ranks, seed, first, ledger = sys.argv[1:]
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    number, step = int(rank), int(first)
    chance = random.Random(f"{seed}/{rank}/{first}")
    monitor = agent.start(
        rank=number, world_size=int(ranks), run=run, server=server, spool=spool, step=step
    )
    assert isinstance(monitor, ArrayMonitor)
    with Path(ledger).open("a", encoding="ascii", buffering=1) as book:
        while not ended:
            book.write(f"{step}\n")
            monitor.step(loss=loss_of(int(seed), number, step))
            step += 1
            time.sleep(chance.uniform(0.005, 0.03))
        monitor.close()
        dropped = dict(monitor._connection.sender.counters.dropped)
        book.write(json.dumps({"dropped": dropped}) + "\n")


if __name__ == "__main__":
    main()
