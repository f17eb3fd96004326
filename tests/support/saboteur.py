"""A trainer with everything the probes read, and faults to put into the agent that watches it.

The faults are real where they can be: allocations that fail because there is no such memory,
`/dev/full` for a full disk, sockets that accept and never answer. What is replaced is only the one
function that is to fail.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from rankscope import agent
from rankscope.agent import guard

AGENT = Path(agent.__file__).parent

STEPS = 12
# Steps after which the trainer evaluates.
EVALUATED = 5
OVERFLOWS = 3


class Net(nn.Module):
    """Has what there is to see: dropout, buffers, several kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x).relu())))


@dataclass
class Outcome:
    """What a training came to.

    Attributes:
        digest: of losses, parameters, buffers, optimizer state and random state, bit for bit.
        attach_seconds, close_seconds: how long the trainer waited there.
        slowest_step: seconds.
    """

    digest: str = ""
    losses: list[float] = field(default_factory=list)
    attach_seconds: float = 0.0
    close_seconds: float = 0.0
    slowest_step: float = 0.0


def train(
    attach: Callable[[nn.Module, torch.optim.Optimizer], Any] | None = None,
    *,
    steps: int = STEPS,
    each: Callable[[int], None] = lambda step: None,
    parallel: bool = False,
) -> Outcome:
    """Trains for some steps, watched where `attach` is given; what the trainer is left with.

    Args:
        attach: returns the monitor.
        steps: of the optimizer, those skipped included.
        each: called after each step.
        parallel: with DistributedDataParallel and a loss scale, and one step that overflows; the
            process group must be there.
    """
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)
    model: nn.Module = Net()
    if parallel:
        model = nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=parallel)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    criterion = nn.CrossEntropyLoss()
    outcome = Outcome()
    monitor = None
    if attach is not None:
        began = time.perf_counter()
        monitor = attach(model, optimizer)
        outcome.attach_seconds = time.perf_counter() - began
        monitor.watch(average, "average")
    for step in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(8, 6, generator=data)
            y = torch.randint(0, 3, (8,), generator=data)
            loss = criterion(model(x), y) / 2
            if parallel and step == OVERFLOWS:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        outcome.losses.append(loss.item())
        if monitor is not None:
            monitor.log(seen=step, loss_seen=loss, nothing_seen=torch.full((), math.nan))
        if step == EVALUATED:
            model.eval()
            with torch.no_grad():
                outcome.losses.append(criterion(model(x), y).item())
            model.train()
            if monitor is not None:
                monitor.mark("evaluated")
        each(step)
        outcome.slowest_step = max(outcome.slowest_step, time.perf_counter() - began)
    if monitor is not None:
        began = time.perf_counter()
        monitor.close()
        outcome.close_seconds = time.perf_counter() - began
    outcome.digest = _digest(model, average, optimizer, outcome.losses)
    return outcome


def _digest(
    model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]
) -> str:
    digest = hashlib.sha256(repr(losses).encode())
    tensors = [*model.state_dict().values(), *average.state_dict().values()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
    for tensor in [*tensors, torch.get_rng_state()]:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------ faults


class Sabotage(Exception):
    """What a sabotaged part of the agent raises."""


def raises(*args: Any, **kwargs: Any) -> Any:
    """Fails as a bug does."""
    raise Sabotage("sabotaged")


def allocates(*args: Any, **kwargs: Any) -> Any:
    """Runs out of memory: nobody has four exabytes."""
    return bytes(2**62)


def allocates_tensor(*args: Any, **kwargs: Any) -> Any:
    """Runs out of memory in torch, which raises a RuntimeError on the host."""
    return torch.empty(2**60)


def interrupts(*args: Any, **kwargs: Any) -> Any:
    """Ctrl-C arrives just there."""
    raise KeyboardInterrupt


class Hang:
    """Stands in for a function and does not come back before `release`.

    Attributes:
        entered: set when somebody hangs in it.
        threads: names of the threads that do.
    """

    def __init__(self, original: Callable[..., Any] | None = None) -> None:
        self._original = original
        self._released = threading.Event()
        self.entered = threading.Event()
        self.threads: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        self._released.wait()
        return None if self._original is None else self._original(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else lambda *a, **k: self(instance, *a, **k)

    def release(self) -> None:
        """Lets everybody go who hangs in it, and who will come."""
        self._released.set()


class Once:
    """Does something else at the first call (or the `first`th), and is the original after that."""

    def __init__(
        self, original: Callable[..., Any], fault: Callable[..., Any] = raises, *, first: int = 1
    ) -> None:
        self._original = original
        self._fault = fault
        self._first = first
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self._first:
            return self._fault(*args, **kwargs)
        return self._original(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else lambda *a, **k: self(instance, *a, **k)


# ----------------------------------------------------------------------------------- bad servers


class BadServer:
    """Accepts connections and does with each what `behave` says, until it is left.

    Attributes:
        url: where it listens.
        connections: number of connections taken.
    """

    def __init__(self, behave: Callable[[socket.socket, threading.Event], None]) -> None:
        self._behave = behave
        self._stopping = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self.connections = 0
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> BadServer:
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(0.2)
                self._behave(connection, self._stopping)
            except OSError:
                return  # the agent went away


def is_silent(connection: socket.socket, stopping: threading.Event) -> None:
    """Accepts and never answers."""
    stopping.wait()


def drips(connection: socket.socket, stopping: threading.Event) -> None:
    """Answers for ever, a byte now and then, so that no read ever waits long."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not stopping.wait(0.05):
        connection.sendall(b"x")


def drips_body(connection: socket.socket, stopping: threading.Event) -> None:
    """The same with a proper beginning."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
    while not stopping.wait(0.05):
        connection.sendall(b" ")


def babbles(connection: socket.socket, stopping: threading.Event) -> None:
    """Answers what is no HTTP."""
    connection.recv(65536)
    connection.sendall(bytes(range(256)) * 300)


def serves_a_page(connection: socket.socket, stopping: threading.Event) -> None:
    """Answers 200 and a page, as the login page of a network does."""
    connection.recv(65536)
    page = b"<html>please log in" + b" " * 100_000
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)


def breaks(connection: socket.socket, stopping: threading.Event) -> None:
    """Answers 500."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def promises_too_much(connection: socket.socket, stopping: threading.Event) -> None:
    """Announces more than it sends, and goes away."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{}")


def slams_the_door(connection: socket.socket, stopping: threading.Event) -> None:
    """Resets each connection."""
    option = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)


BAD = (
    is_silent,
    drips,
    drips_body,
    babbles,
    serves_a_page,
    breaks,
    promises_too_much,
    slams_the_door,
)


# ----------------------------------------------------------------- every function of the agent once


class Tracer:
    """Sees each function of the agent that this thread enters while `with` it.

    Attributes:
        entered: `folder/file.py:function` of those seen, in the order of their first call.
        pending: those that still have to fail: each at its next call, one at a time.
        failed: those that have.
    """

    def __init__(self, pending: Iterable[str] = ()) -> None:
        self.entered: dict[str, None] = {}
        self.pending = set(pending)
        self.failed: list[str] = []
        self._names: dict[CodeType, str] = {}
        self._before: Any = None

    def __enter__(self) -> Tracer:
        self._before = sys.gettrace()
        self.go_on()
        guard.observers.append(self._contained)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        guard.observers.remove(self._contained)

    def go_on(self) -> None:
        """Traces again: the interpreter stops to once a trace function has raised."""
        sys.settrace(self._trace)

    def _contained(self, probe: str, fault: Exception) -> None:
        if isinstance(fault, Sabotage):
            self.go_on()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            name = self._names[code] = _name_of(code)
        if not name:
            return
        self.entered.setdefault(name)
        if name in self.pending:
            self.pending.remove(name)
            self.failed.append(name)
            raise Sabotage(name)


def _name_of(code: CodeType) -> str:
    """Empty for a function of somebody else, and for the bodies of modules and classes."""
    if not code.co_filename.startswith(str(AGENT)) or not code.co_flags & inspect.CO_OPTIMIZED:
        return ""
    path = Path(code.co_filename).relative_to(AGENT).as_posix()
    return f"{path}:{code.co_qualname}"
