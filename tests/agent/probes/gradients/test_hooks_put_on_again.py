"""Hooks that are put on at every sample: registered once, and where they belong each time."""

import copy
import io
from collections import OrderedDict

import torch
from torch import nn

from rankscope.agent.probes.gradients.tensor_hooks import TensorHooks
from rankscope.agent.probes.modules.module_hook import ModuleHooks


class Listener:
    def __init__(self):
        self.called = []

    def module_called(self, place, module, args, output):
        self.called.append(place)


def test_module_hooks_are_called_only_while_they_are_on():
    model, listener, hooks = nn.Sequential(nn.ReLU(), nn.ReLU()), Listener(), ModuleHooks()
    modules = list(model.modules())
    for _ in range(3):
        hooks.put_on(listener, modules)
        assert hooks
        model(torch.ones(1))
        assert listener.called == [1, 2, 0]
        hooks.take_off()
        assert not hooks
        listener.called.clear()
        model(torch.ones(1))
        assert not listener.called
        assert not any(m._forward_hooks for m in modules)
    hooks.remove()
    assert not any(vars(m._forward_hooks) for m in modules)


def test_a_table_of_hooks_that_was_replaced_gets_them_as_well():
    model, listener, hooks = nn.Sequential(nn.ReLU()), Listener(), ModuleHooks()
    modules = list(model.modules())
    hooks.put_on(listener, modules)
    hooks.take_off()
    model[0]._forward_hooks = OrderedDict()
    hooks.put_on(listener, modules)
    model(torch.ones(1))
    assert listener.called == [1, 0]
    hooks.remove()
    assert not any(m._forward_hooks for m in modules)


def test_hooks_put_on_again_are_in_no_copy_though_others_were_removed_meanwhile():
    model, modules = nn.Sequential(nn.ReLU()), []
    modules = list(model.modules())
    one, other = (ModuleHooks(), Listener()), (ModuleHooks(), Listener())
    one[0].put_on(one[1], modules)
    one[0].take_off()
    other[0].put_on(other[1], modules)
    other[0].remove()
    one[0].put_on(one[1], modules)
    assert not any(m._forward_hooks for m in copy.deepcopy(model).modules())
    file = io.BytesIO()
    torch.save(model, file)
    assert b"rankscope" not in file.getvalue()
    one[0].remove()


def test_tensor_hooks_are_called_only_while_they_are_on():
    seen = []
    model = nn.Linear(2, 2)
    hooks = TensorHooks((p, lambda g, n=n: seen.append(n)) for n, p in model.named_parameters())
    for _ in range(3):
        hooks.put_on()
        model(torch.ones(1, 2)).sum().backward()
        assert sorted(seen) == ["bias", "weight"]
        hooks.take_off()
        seen.clear()
        model(torch.ones(1, 2)).sum().backward()
        assert not seen
        assert not any(p._backward_hooks for p in model.parameters())


def test_a_frozen_tensor_gets_its_hook_when_it_is_trained_again():
    seen = []
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    hooks = TensorHooks((p, lambda g, n=n: seen.append(n)) for n, p in model.named_parameters())
    hooks.put_on()
    model(torch.ones(1, 2)).sum().backward()
    assert seen == ["weight"]
    hooks.take_off()
    model.bias.requires_grad_(True)
    model.weight._backward_hooks = None  # somebody takes all hooks off
    hooks.put_on()
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(seen[1:]) == ["bias", "weight"]
    hooks.take_off()
    assert not any(p._backward_hooks for p in model.parameters())
