"""What the training thread does can wait for nobody: no lock, no socket, no file.

What runs on which thread stands in `test_sender_faults.py`.
"""

from __future__ import annotations

import ast
import builtins
import io
import os
import socket
import threading
import time

import pytest

from rankscope.agent.delivery import records
from tests.support import saboteur

# Modules whose functions run on the training thread between `attach` and `close`.
ON_THE_STEP_PATH = [
    "guard.py",
    "steps/hooks.py",
    "monitor.py",
    "steps/readout.py",
    "delivery/records.py",
    "schedule.py",
    "model/tensors.py",
    "steps/torch_monitor.py",
    "steps/probe_calls.py",
    "steps/forward_hook.py",
    "steps/logged.py",
    "model/tracked.py",
    *(p.relative_to(saboteur.AGENT).as_posix() for p in saboteur.AGENT.glob("probes/**/*.py")),
]
# Methods of the same name as what opens a file.
OPENS_NO_FILE = {"self._plan.open()"}  # the sketches of a plan
WAITING = {"acquire", "join", "recv", "connect", "select", "wait_for", "flock", "fsync"}


@pytest.mark.parametrize("name", ON_THE_STEP_PATH)
def test_nothing_in_the_source_waits(name):
    tree = ast.parse((saboteur.AGENT / name).read_text())
    called = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # `", ".join(...)` joins words.
            of_texts = isinstance(node.func.value, ast.Constant) or isinstance(
                node.func.value, ast.JoinedStr
            )
            is_join = node.func.attr == "join" and node.args
            if not of_texts and not is_join and ast.unparse(node) not in OPENS_NO_FILE:
                called.add(node.func.attr)
    assert not called & (WAITING | {"open", "input", "Lock", "RLock", "Condition", "Queue"})


class Forbidden:
    """Counts who uses something on the training thread, and lets others."""

    def __init__(self, original, thread, used):
        self._original, self._thread, self._used = original, thread, used

    def __call__(self, *args, **kwargs):
        if threading.get_ident() == self._thread:
            self._used.append(getattr(self._original, "__name__", repr(self._original)))
        return self._original(*args, **kwargs)


class WatchedLock:
    """A lock that notes which thread has asked for it."""

    def __init__(self, lock, askers):
        self._lock, self._askers = lock, askers

    def acquire(self, *args, **kwargs):
        self._askers.append(threading.get_ident())
        return self._lock.acquire(*args, **kwargs)

    def release(self):
        self._lock.release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()


def test_the_step_path_asks_for_no_lock_no_socket_and_no_file(house, monkeypatch):
    used, askers = [], []
    me = threading.get_ident()

    def each(step):
        if step == 9:
            # What is used for the first time may be read from disk: kernels, modules.
            one = house.monitors[-1]._connection.sender
            one._turn = one._delivery._turn = WatchedLock(one._turn, askers)
            for module, name in [
                (builtins, "open"),
                (io, "open"),
                (os, "open"),
                (os, "write"),
                (os, "mkdir"),
                (os, "stat"),
                (socket, "socket"),
                (socket, "create_connection"),
                (socket, "getaddrinfo"),
                (time, "sleep"),
            ]:
                monkeypatch.setattr(module, name, Forbidden(getattr(module, name), me, used))
        if step == 19:
            monkeypatch.undo()
            assert me not in askers

    house.train(steps=20, each=each)
    assert used == []
    assert askers, "the sender asks for its own lock"


@pytest.mark.alone
def test_the_training_goes_on_while_the_sender_holds_everything(house):
    """As if a disk hung under it: with its lock held, for ever."""
    freed = threading.Event()
    held = threading.Event()

    def hold():
        with house.monitors[-1]._connection.sender._turn:
            held.set()
            freed.wait()

    def each(step):
        if step == 1:
            threading.Thread(target=hold).start()
            held.wait()
        if step == 10:
            freed.set()

    outcome = house.train(each=each)
    assert outcome.slowest_step < 1


def test_publishing_has_no_lock():
    locks = type(threading.Lock()), type(threading.RLock()), threading.Condition
    made = records.Records()
    assert not [v for v in vars(made).values() if isinstance(v, locks)]
