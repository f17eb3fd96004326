"""What a thread is said to do, while it really does it."""

import io
import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from rankscope.agent.delivery.process_exit import Once
from rankscope.agent.process.thread_phase import phase_of, place_of, stacks_of
from tests.support.jobs import waits_for_worker
from tests.support.jobs.second_rank import come_when_signalled, join
from tests.support.servers.collector import wait_until
from tests.support.watching import Watching

LONGEST = 30


class Gate:
    """Where the trainer's code stops until the test lets it go on."""

    def __init__(self):
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, *values):
        self.reached.set()
        assert self._open.wait(LONGEST)
        return values[0] if values else None

    def open(self):
        self._open.set()


class Running:
    """A function in a thread of its own."""

    def __init__(self, function):
        self._pool = ThreadPoolExecutor(1)
        self.ident = self._pool.submit(threading.get_ident).result()
        self._result = self._pool.submit(function)

    @property
    def phase(self):
        return phase_of(self.ident)

    def end(self):
        self._result.result(LONGEST)
        self._pool.shutdown()


def phase_at(gate, function):
    """The phase while a function is at the gate."""
    running = Running(function)
    try:
        assert gate.reached.wait(LONGEST)
        return running.phase
    finally:
        gate.open()
        running.end()


@pytest.fixture
def gate():
    return Gate()


class Stops(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.gate = gate

    def forward(self, x):
        return self.gate(x * self.weight)


class StopsBackward(torch.autograd.Function):
    gate = None

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return StopsBackward.gate(gradient)


class Samples(Dataset):
    def __init__(self, wait):
        self.wait = wait

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.wait()
        return torch.ones(1)


class StopsStep(torch.optim.SGD):
    gate = None

    @torch.no_grad()
    def step(self, closure=None):
        if self.gate is not None:
            self.gate()
        if closure is not None:
            with torch.enable_grad():
                closure()


class File(io.BytesIO):
    gate = None

    def write(self, data):
        self.gate()
        return super().write(data)


def backward(gate, call):
    StopsBackward.gate = gate
    weight = torch.ones(1, requires_grad=True)
    call(StopsBackward.apply(weight).sum(), weight)


def scheduled(gate):
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: gate(1) if epoch else 1)
    optimizer.step()
    scheduler.step()


def stepping(gate, closure=None):
    optimizer = StopsStep([torch.ones(1, requires_grad=True)], lr=0.1)
    if closure is None:
        optimizer.gate = gate
    optimizer.step(closure)


def saved(gate):
    file = File()
    file.gate = gate
    torch.save(torch.ones(3), file)


def deep(gate, depth):
    return gate() if depth == 0 else deep(gate, depth - 1)


PHASES = {
    "forward": lambda gate: Stops(gate)(torch.ones(1)),
    "forward of a part": lambda gate: nn.Sequential(nn.ReLU(), Stops(gate))(torch.ones(1)),
    "forward deep below": lambda gate: Stops(lambda x: deep(gate, 100))(torch.ones(1)),
    "backward": lambda gate: backward(gate, lambda loss, weight: loss.backward()),
    "backward by grad": lambda gate: backward(
        gate, lambda loss, weight: torch.autograd.grad(loss, weight)
    ),
    "data": lambda gate: list(DataLoader(Samples(gate))),
    "step": stepping,
    "forward in a closure": lambda gate: stepping(gate, lambda: Stops(gate)(torch.ones(1))),
    "backward in a closure": lambda gate: stepping(
        gate, lambda: backward(gate, lambda loss, weight: loss.backward())
    ),
    "scheduler": scheduled,
    "checkpoint": saved,
    "idle": lambda gate: gate(),
    "idle too deep": lambda gate: Stops(lambda x: deep(gate, 300))(torch.ones(1)),
}


@pytest.mark.parametrize(("name", "function"), PHASES.items(), ids=PHASES.keys())
def test_a_phase(gate, name, function):
    assert phase_at(gate, lambda: function(gate)) == name.split()[0]


def test_a_worker_that_is_waited_for():
    """The thread waits for another process that loads."""
    program = [sys.executable, waits_for_worker.__file__]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=4 * LONGEST)
    assert (ended.returncode, ended.stdout) == (0, "data\n"), ended.stderr


def test_a_place_in_the_agent_is_none_of_the_users():
    once = Once(LONGEST)
    assert once.begins()

    def train():
        once.begins()  # waits for the first

    running = Running(train)
    try:
        wait_until(lambda: place_of(running.ident).startswith("train (test_thread_phase.py:"))
    finally:
        once.is_over()
        running.end()


def test_a_call_that_waits_for_something_else_without_a_process_group():
    # A lock's `acquire` is a call into C that has no frame, as the `wait` of a collective.
    lock = threading.Lock()
    lock.acquire()
    handle = SimpleNamespace(wait=lock.acquire)
    reached = threading.Event()

    def train():
        reached.set()
        handle.wait()

    running = Running(train)
    assert reached.wait(LONGEST)
    try:
        wait_until(lambda: place_of(running.ident).startswith("train (test_thread_phase.py:"))
        assert running.phase == "idle"
    finally:
        lock.release()
        running.end()


def test_a_thread_that_is_gone():
    running = Running(lambda: None)
    running.end()
    assert phase_of(running.ident) == ""


def test_the_phase_of_the_monitor_knows_evaluation(tmp_path):
    with Watching(tmp_path) as watching:
        gates = [Gate(), Gate()]
        model = Stops(gates[0])
        attached = threading.Event()

        def train():
            monitor = watching.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            attached.set()
            model(torch.ones(1))
            model.gate = gates[1]
            model.eval()
            model(torch.ones(1))
            return monitor

        running = Running(train)
        phases = []
        for gate in gates:
            assert gate.reached.wait(LONGEST)
            phases.append(watching.monitors[0].phase)
            gate.open()
        running.end()
        assert attached.is_set()
        assert phases == ["forward", "evaluation"]


def test_in_a_collective_that_the_other_rank_does_not_come_to(tmp_path):
    """Alone, under a forward pass, and one that goes on meanwhile and is waited for."""
    spawn = multiprocessing.get_context("spawn")
    store, signal = str(tmp_path / "store"), spawn.Semaphore(0)
    other = spawn.Process(target=come_when_signalled, args=(store, signal, 3))
    other.start()
    try:
        join(store, 0)

        class Synchronised(nn.Module):
            def forward(self, x):
                torch.distributed.all_reduce(x)
                return x

        for call in (
            lambda: torch.distributed.all_reduce(torch.ones(1)),
            lambda: Synchronised()(torch.ones(1)),
            lambda: torch.distributed.all_reduce(torch.ones(1), async_op=True).wait(),
        ):
            running = Running(call)
            wait_until(lambda running=running: running.phase == "collective")
            signal.release()
            running.end()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        other.join(LONGEST)
        assert other.exitcode == 0


def test_stacks_name_where_each_thread_is_the_asked_one_first():
    gate = Gate()

    def deep(levels):
        return deep(levels - 1) if levels else gate()

    own = threading.Thread(target=gate, name="rankscope-sender")
    own.start()
    assert gate.reached.wait(LONGEST)
    gate.reached.clear()
    running = Running(lambda: deep(60))
    try:
        assert gate.reached.wait(LONGEST)
        stacks = stacks_of(running.ident)
    finally:
        gate.open()
        running.end()
        own.join()
    assert "rankscope-sender" not in stacks
    first, *others = stacks
    assert first.startswith("ThreadPoolExecutor")
    assert "MainThread" in others
    assert len(stacks[first]) == 25
    places = [line for line in stacks[first] if line.startswith("deep (test_thread_phase.py:")]
    assert len(places) > 15
    assert all(len(line) <= 80 for lines in stacks.values() for line in lines)
