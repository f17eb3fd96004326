"""Reads the stack of a thread that runs, all the time, while garbage gives the interpreter away.

Run as a script with the seconds that it takes: what a wrong walk does is a segmentation fault.
"""

import gc
import os
import random
import sys
import threading
import time

from rankscope.agent.process.thread_phase import phase_of, place_of, stacks_of


class Cycle:
    """What only the collector frees, and another thread may run then."""

    alive = 0

    def __init__(self):
        self.own = self
        Cycle.alive += 1

    def __del__(self):
        Cycle.alive -= 1
        if random.random() < 0.01:
            time.sleep(0)


def calls(depth):
    Cycle()
    return calls(depth - 1) + 1 if depth else 0


def train():
    while True:
        calls(random.randrange(30))
        # A collection lets this thread go on, which must not make more than the other one frees.
        if Cycle.alive > 5000:
            time.sleep(0.001)


def main():
    gc.set_threshold(100)
    sys.setswitchinterval(1e-5)
    training = threading.Thread(target=train, daemon=True)
    training.start()
    end, walks, seen = time.monotonic() + float(sys.argv[1]), 0, set()
    while time.monotonic() < end:
        assert phase_of(training.ident) == "idle"
        seen.add(place_of(training.ident).partition(" ")[0])
        assert 1 <= len(stacks_of(training.ident)) <= 2
        walks += 1
    assert seen <= {"", "calls", "train", "__init__", "__del__"}, seen
    assert "calls" in seen
    assert walks > 100
    assert gc.isenabled()
    sys.stdout.flush()
    # The training thread never ends.
    os._exit(0)


if __name__ == "__main__":
    main()
