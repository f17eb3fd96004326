"""The modules of a model are found again when one has changed, and only then."""

import pytest
import torch
from torch import nn

from rankscope.agent.model.modules import NamedModules


def model_of():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


def add_inside(model):
    model[1].add_module("late", nn.ReLU())


def add_to_a_leaf(model):
    model[0].adapter = nn.Linear(2, 2)


def replace(model):
    model[0] = nn.Linear(2, 2)


def take_away(model):
    del model[1]


def rename(model):
    model[1]._modules["other"] = model[1]._modules.pop("1")


def replace_the_table(model):
    model[1]._modules = {"0": nn.Tanh()}


def swap(model):
    model[0], model[1] = model[1], model[0]


class Equal(nn.Linear):
    """Says that it is equal to all others."""

    def __eq__(self, other):
        return True

    __hash__ = nn.Module.__hash__


def replace_by_an_equal_one(model):
    model[0] = Equal(2, 2)


def test_the_list_is_the_same_until_something_has_changed():
    for change in (
        add_inside,
        add_to_a_leaf,
        replace,
        take_away,
        rename,
        replace_the_table,
        swap,
        replace_by_an_equal_one,
    ):
        model = model_of()
        modules = NamedModules(model)
        first = modules.named()
        assert first == list(model.named_modules())
        assert modules.named() is first
        change(model)
        again = modules.named()
        assert [n for n, _ in again] == [n for n, _ in model.named_modules()], change
        assert all(a is b for (_, a), b in zip(again, model.modules(), strict=True)), change
        assert modules.named() is again


def test_an_equal_module_in_the_place_of_an_equal_one_is_another_one():
    model = nn.Sequential(Equal(2, 2))
    modules = NamedModules(model)
    modules.named()
    model[0] = Equal(2, 2)
    assert modules.named()[1][1] is model[0]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_modules_that_name_theirs_in_their_own_way_are_asked_each_time():
    class Own(nn.Sequential):
        hidden = False

        def named_modules(self, *args, **kwargs):
            yield from () if self.hidden else super().named_modules(*args, **kwargs)

    model = nn.Sequential(Own(nn.ReLU()))
    modules = NamedModules(model)
    assert len(modules.named()) == 3
    model[0].hidden = True
    assert len(modules.named()) == 1
    scripted = NamedModules(torch.jit.script(model_of()))
    assert [n for n, _ in scripted.named()] == ["", "0", "1", "1.0", "1.1"]
    assert scripted.is_compiled()


def test_a_module_compiled_in_place_is_seen_though_no_module_has_changed():
    model = model_of()
    modules = NamedModules(model)
    assert not modules.is_compiled()
    model[1][0].compile(backend="eager")
    assert modules.is_compiled()
    assert NamedModules(nn.Sequential(torch.compile(nn.ReLU(), backend="eager"))).is_compiled()


def test_buffers_are_those_that_the_model_names():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2)))
    model.register_buffer("mask", torch.ones(2))
    model[1].register_buffer("shared", model.mask)
    model[1].register_buffer("none", None)
    modules = NamedModules(model)

    def names():
        named = list(model.named_buffers())
        assert [n for n, _ in modules.named_buffers()] == [n for n, _ in named]
        assert all(a is b for (_, a), (_, b) in zip(modules.named_buffers(), named, strict=True))
        return [n for n, _ in named]

    assert "1.shared" not in names()
    model[0].register_buffer("late", torch.ones(3))
    model.mask = torch.zeros(2)
    assert {"0.late", "mask", "1.shared"} <= set(names())

    class Own(nn.BatchNorm1d):
        def named_buffers(self, *args, **kwargs):
            yield "mine", torch.ones(1)

    assert [n for n, _ in NamedModules(Own(2)).named_buffers()] == ["mine"]
