"""Models and optimizers that are copied, saved, traced, and used in other processes."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tests.support.watching import Diary


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=generator)
    return functional.cross_entropy(model(x), torch.arange(5) % 3)


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def train(model, optimizer, diary, steps, at=lambda moment: None):
    for step in steps:
        optimizer.zero_grad()
        at("begin")
        loss = loss_of(model, step)
        at("forward")
        loss.backward()
        at("backward")
        optimizer.step()
        at("step")
        diary.step(loss)


def test_state_dicts_have_the_same_bytes_at_every_moment(watching):
    def states(watched):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if watched:
            watching.attach(model, optimizer)
        found = []

        def keep(moment):
            found.append((moment, saved(model.state_dict()), saved(optimizer.state_dict())))

        train(model, optimizer, Diary(model), range(3), at=keep)
        return found

    plain, watched = states(False), states(True)
    assert len(plain) == 12
    for one, other in zip(plain, watched, strict=True):
        assert one == other


LOAD = """
import sys
sys.modules["rankscope"] = None  # not importable
import pickle, torch
for path in sys.argv[1:]:
    if path.endswith(".pickle"):
        model, optimizer = pickle.load(open(path, "rb"))
    else:
        model, optimizer = torch.load(path, weights_only=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
    print(model.state_dict()["1.num_batches_tracked"].item())
"""


def test_what_is_saved_whole_loads_where_rankscope_is_not(watching, tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watching.attach(model, optimizer)
    paths = []

    def keep(moment):
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 6))  # what hooks an evaluation needs are on
        for evaluating in (True, False):
            model.train(not evaluating)
            path = tmp_path / f"{len(paths)}-{moment}"
            torch.save((model, optimizer), path)
            path.with_suffix(".pickle").write_bytes(pickle.dumps((model, optimizer)))
            paths.extend((str(path), str(path.with_suffix(".pickle"))))

    train(model, optimizer, Diary(model), range(2), at=keep)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    tracked = [n for n in (0, 1, 1, 1, 1, 2, 2, 2) for _ in range(4)]
    evaluating = [2 if i % 4 > 1 else 0 for i in range(len(tracked))]
    assert [int(n) for n in done.stdout.split()] == [
        n + more for n, more in zip(tracked, evaluating, strict=True)
    ]


@pytest.mark.parametrize("moment", ["begin", "forward", "backward", "step"])
def test_a_copied_model_that_is_trained_further_reports_nothing(watching, moment):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    copies = 0

    def train_a_copy(now):
        nonlocal copies
        if now != moment:
            return
        twin = copy.deepcopy(model)
        own = torch.optim.SGD(twin.parameters(), lr=0.1)
        for seed in (100, 101):
            own.zero_grad()
            loss_of(twin, seed).backward()
            own.step()
        copies += 1

    diary = Diary(model)
    train(model, optimizer, diary, range(4), at=train_a_copy)
    assert copies == 4
    diary.check(watching)
    assert {
        s for s, digest in watching.model_digests("outside_optimizer").items() if digest
    } == set()


def test_a_copied_pair_of_model_and_optimizer_reports_nothing(watching):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    twin, own = copy.deepcopy((model, optimizer))
    train(twin, own, Diary(twin), range(3, 6))
    train(model, optimizer, diary, range(3, 6))
    diary.check(watching)


def test_a_copy_is_evaluated(watching):
    """An average of the weights, say: its losses are no evaluation of the model in training."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)

    def evaluate(moment):
        twin = copy.deepcopy(model).eval()
        with torch.no_grad():
            loss_of(twin, 7)

    train(model, optimizer, diary, range(4), at=evaluate)
    diary.check(watching)
    assert watching.points("eval/loss") == {}


class Distilled(Dataset):
    """Its samples go through the model, in the worker."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        if index % 2:
            functional.cross_entropy(self.model.train()(x.repeat(2, 1)), torch.zeros(2).long())
            return x, index % 3
        with torch.no_grad():
            return x, int(self.model.eval()(x[None]).argmax())


def test_workers_that_fork(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    loader = DataLoader(
        Distilled(model), batch_size=5, num_workers=2, multiprocessing_context="fork"
    )
    for _ in range(2):
        for x, y in loader:
            loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            diary.step(loss)
    assert len(diary.losses) == 16
    diary.check(watching)
    assert len({b.session for b in watching.batches()}) == 1
    assert watching.points("eval/loss") == {}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
@pytest.mark.parametrize("moment", ["begin", "forward", "backward", "step"])
def test_scripted_and_traced(watching, moment):
    """What torch.jit makes computes what the model does, is saved, and reports nothing."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    x = torch.randn(4, 6)
    made = 0

    def compile_it(now):
        nonlocal made
        if now != moment:
            return
        hooks = [dict(m._forward_pre_hooks) for m in model.modules()]
        model.eval()
        with torch.no_grad():
            compiled = torch.jit.trace(model, x, check_trace=False), torch.jit.script(model)
            twin = torch.jit.script(copy.deepcopy(model))
            expected = copy.deepcopy(model)(x)
            for one in (*compiled, twin):
                buffer = io.BytesIO()
                torch.jit.save(one, buffer)
                buffer.seek(0)
                assert torch.equal(torch.jit.load(buffer)(x), expected)
                made += 1
        model.train()
        assert [dict(m._forward_pre_hooks) for m in model.modules()] == hooks

    train(model, optimizer, diary, range(3), at=compile_it)
    assert made == 9
    diary.check(watching)
    assert watching.points("eval/loss") == {}
    watching.close()
    assert torch.jit._recursive.create_script_module.__module__ == "torch.jit._recursive"
