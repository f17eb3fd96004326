"""Whatever a trainer copies, pickles, saves, exports or compiles has nothing of the agent in it.

Two trainings of the same seed, one of them watched, keep everything in every way and at every
moment of their steps; what each keeps must be the same, to the byte where there are bytes.
"""

import copy
import io
import json
import pickle
import pickletools
import re
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from rankscope import agent
from tests.support import kept
from tests.support.kept import CLASSES, FEATURES, Net, OwnState, noted, saved, schedule_of

MOMENTS = ("begin", "forward", "backward", "step", "evaluation")
STEPS = 2


class Training:
    """One training, as far as it has come.

    Attributes:
        called: what runs forward.
    """

    def __init__(self, kind):
        torch.manual_seed(0)
        RemovableHandle.next_id = 10**6  # the numbers of the user's hooks are kept as well
        self.model = OwnState() if kind == "own state" else Net()
        if kind == "own hooks":
            for module in self.model.modules():
                module.register_forward_hook(noted)
        self.called = self.model
        if kind == "parallel":
            self.called = DistributedDataParallel(self.model)
        elif kind == "compiled":
            self.called = torch.compile(self.model, backend="eager")
        elif kind == "compiled in place":
            self.model.compile(backend="eager")
        elif kind == "scripted":
            self.called = self.model = torch.jit.script(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = schedule_of(self.optimizer)
        self.average = AveragedModel(self.model) if kind == "averaged" else None

    def train(self, at, steps=STEPS):
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(5, FEATURES, generator=generator)
            self.optimizer.zero_grad()
            at(step, "begin")
            loss = functional.cross_entropy(self.called(x), torch.arange(5) % CLASSES)
            if step == STEPS - 1:
                loss = loss * float("nan")  # from now on everything is watched
            at(step, "forward")
            loss.backward()
            at(step, "backward")
            self.optimizer.step()
            if self.average is not None:
                self.average.update_parameters(self.model)
            at(step, "step")
            self.schedule.step()
            self.called.eval()
            with torch.no_grad():
                functional.cross_entropy(self.called(x), torch.arange(5) % CLASSES)
            at(step, "evaluation")
            self.called.train()


def things(training, kind):
    """What a trainer may keep, by name."""
    everything = {
        "model": training.called,
        "optimizer": training.optimizer,
        "schedule": training.schedule,
    }
    if kind == "optimizer":
        return {"optimizer": training.optimizer, "schedule": training.schedule}
    if kind == "averaged":
        return {"average": training.average}
    return {"model": training.called, "all": everything}


def attempted(way, thing):
    """What a way of keeping gives; where it cannot be kept so, why."""
    try:
        return way(thing)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {without_numbers(error)}"


def without_numbers(text):
    """Addresses and the numbers that torch.jit gives to classes are never the same."""
    return re.sub(r"0x[0-9a-f]+|___torch_mangle_\d+\.?|\.___torch_mangle_\d+", "", str(text))


BYTES = {
    "pickle": pickle.dumps,
    "pickle in Python": pickle._dumps,
    "cloudpickle": cloudpickle.dumps,
    "copied": lambda thing: saved(copy.copy(thing)),
    "copied deeply": lambda thing: saved(copy.deepcopy(thing)),
    "whole.pt": saved,
    "states.pt": lambda thing: saved(states(thing)),
}


def operations(pickled):
    """A pickle as a list, with what is in storages in place of their addresses."""
    found = []
    for operation, given, _ in pickletools.genops(pickled):
        if isinstance(given, bytes) and len(given) > 100:
            given = torch.load(io.BytesIO(given), weights_only=False)._untyped_storage.tolist()
        found.append((operation.name, repr(given)))  # as text: a NaN is what it is
    return found


def same(one, other):
    if one == other:
        return True
    pickles = isinstance(one, bytes) and isinstance(other, bytes) and not one.startswith(b"PK")
    return pickles and operations(one) == operations(other)


def states(thing):
    if isinstance(thing, dict):
        return {name: states(part) for name, part in thing.items()}
    return thing.state_dict()


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def readers():
    """Processes with Rankscope and without: each loads all files of the folders it is given."""
    started = []
    for option in ([], ["--without"]):
        command = [sys.executable, kept.__file__, *option]
        started.append(
            subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
    yield started
    for reader in started:
        reader.communicate(timeout=60)
    assert [reader.returncode for reader in started] == [0, 0]


KINDS = [
    "module",
    "own state",
    "own hooks",
    "optimizer",
    "averaged",
    "parallel",
    "compiled",
    "compiled in place",
    "scripted",
]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_has_the_same_bytes(watching, tmp_path, one_rank, readers, kind):
    def keep_all(watched):
        torch.compiler.reset()
        training = Training(kind)
        if watched:
            watching.attach(training.called, training.optimizer)
        found = {}

        def keep(step, moment):
            for name, thing in things(training, kind).items():
                for way, kept_so in BYTES.items():
                    found[step, moment, name, way] = attempted(kept_so, thing)

        training.train(keep)
        return found

    if kind == "scripted":
        keep_all(False)  # the first calls of all are not computed as those that follow them
    plain, watched = keep_all(False), keep_all(True)
    assert plain.keys() == watched.keys()
    assert [key for key in plain if not same(plain[key], watched[key])] == []
    kept_so = {way for (_, _, _, way), found in plain.items() if isinstance(found, bytes)}
    assert {"pickle", "cloudpickle", "whole.pt", "states.pt"} - kept_so == (
        {"pickle", "cloudpickle", "whole.pt"} if kind == "scripted" else set()
    )
    # And they load, with Rankscope and without, as those of the training that was not watched.
    for folder, files in (("plain", plain), ("watched", watched)):
        for (step, moment, name, way), found in files.items():
            suffix = {"pickle": ".pickle", "whole.pt": ".pt", "states.pt": ".pt"}.get(way)
            if suffix and isinstance(found, bytes) and step == STEPS - 1:
                path = tmp_path / folder / f"{moment}-{name}-{Path(way).stem}{suffix}"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(found)
    for reader in readers:
        reader.stdin.write(f"{tmp_path}\n")
        reader.stdin.flush()
        read = json.loads(reader.stdout.readline())
        mine = {n.partition("/")[2]: r for n, r in read.items() if n.startswith("watched/")}
        theirs = {n.partition("/")[2]: r for n, r in read.items() if n.startswith("plain/")}
        assert mine == theirs
        assert len(mine) >= len(MOMENTS)
        if kind == "module":
            whole = {tuple(r) for n, r in mine.items() if n.endswith("model-whole.pt")}
            assert whole == {("Net", "Net")}


def exported(model):
    program = torch.export.export(model, (torch.ones(5, FEATURES),))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    return without_numbers(program.graph_module.code), without_numbers(loaded.graph_module.code)


DERIVED = {
    "exported": exported,
    "traced symbolically": lambda model: torch.fx.symbolic_trace(model).code,
    "traced": lambda model: str(torch.jit.trace(model, torch.ones(5, FEATURES)).code),
    "for another process": lambda model: bytes(ForkingPickler.dumps(model)).count(b"rankscope"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
@pytest.mark.parametrize("way", DERIVED)
def test_what_is_derived_from_a_model_is_the_same(watching, way):
    def derive_all(watched):
        training = Training("module")
        if watched:
            watching.attach(training.called, training.optimizer)
        found = {}

        def derive(step, moment):
            found[step, moment] = attempted(DERIVED[way], training.model)

        training.train(derive)
        return found

    plain = derive_all(False)
    assert derive_all(True) == plain
    assert not any("Error" in str(code) for code in plain.values())


@pytest.mark.parametrize("mode", ["online", "disabled"])
def test_a_monitor_that_is_kept_with_its_model_is_silent(watching, mode):
    training = Training("module")
    options = {"mode": mode} if mode == "disabled" else {}
    attach = agent.attach if options else watching.attach
    training.model.monitor = attach(training.model, training.optimizer, **options)
    twin = copy.deepcopy(training.model)
    file = io.BytesIO(saved(training.model))
    assert b"rankscope" not in file.getvalue()
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    with torch.serialization.safe_globals([kept._named(name) for name in names]):
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    file.seek(0)
    for silent in (twin, loaded, torch.load(file, weights_only=False)):
        silent.monitor.log(accuracy=1.0)
        silent.monitor.mark("a copy")
        silent.monitor.close()
        assert silent.monitor.closed
    assert not training.model.monitor.closed
    training.model.monitor.log(own=1.0)
    if not options:
        assert set(watching.points("own")) == {0}
        assert watching.points("accuracy") == {}
        assert watching.events("mark") == []
