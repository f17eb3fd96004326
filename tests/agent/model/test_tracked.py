"""Which parameters are watched, and that every change of them is noticed."""

import pytest
import torch
from torch import nn

from rankscope.agent.model.tracked import Role, Tracked
from rankscope.agent.wire import RANK_LOCAL


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def model():
    return net()


@pytest.fixture
def optimizer(model):
    return sgd(model.parameters())


@pytest.fixture
def tracked(model, optimizer):
    return Tracked(model, optimizer)


def test_parameters_of_the_model_and_of_the_optimizer_alone(model):
    model[0].bias.requires_grad_(False)
    free = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1), requires_grad=False)]
    optimizer = sgd([{"params": model.parameters()}, {"params": free}])
    group = Tracked(model, optimizer).group
    assert group.names == ("0.weight", "2.weight", "optimizer.1.0")
    assert group.tensors == (model[0].weight, model[2].weight, free[0])
    assert group.table == "parameters"


def test_names_are_those_of_the_model_without_its_wrappers(model, optimizer):
    compiled = torch.compile(model, backend="eager")
    assert Tracked(compiled, optimizer).group.names == ("0.weight", "0.bias", "2.weight")


def step(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(5, 3)).sum().backward()
        optimizer.step()


NO_CHANGE = {
    "steps": step,
    "zeroed": lambda m, o: m.zero_grad(),
    "mode": lambda m, o: m.eval(),
    "learning rate": lambda m, o: o.param_groups[0].update(lr=1.0),
    "loaded in place": lambda m, o: m.load_state_dict(net().state_dict()),
    "optimizer loaded": lambda m, o: o.load_state_dict(o.state_dict()),
    "the same list anew": lambda m, o: o.param_groups[0].update(params=list(m.parameters())),
    "frozen and unfrozen": lambda m, o: m.requires_grad_(False).requires_grad_(True),
    "cast": lambda m, o: m.double(),
}


@pytest.mark.parametrize("change", NO_CHANGE.values(), ids=NO_CHANGE.keys())
def test_what_is_no_change(model, optimizer, tracked, change):
    change(model, optimizer)
    assert not tracked.changed()


def test_buffers_and_hooks_are_no_change(model, tracked):
    model[0].register_buffer("mean", torch.zeros(4))
    model.register_forward_hook(lambda *args: None)
    assert not tracked.changed()


def replace_layer(model, optimizer):
    model[2] = nn.Linear(4, 2, bias=False)


def replace_parameter(model, optimizer):
    model[0].weight = nn.Parameter(torch.zeros(4, 3))


def replace_in_optimizer(model, optimizer):
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(2))


def remove_parameter(model, optimizer):
    model[0].bias = None


CHANGES = {
    "layer replaced": (replace_layer, "replaced by another tensor: 2.weight"),
    "parameter replaced": (replace_parameter, "replaced by another tensor: 0.weight"),
    "assigned": (
        lambda m, o: m.load_state_dict(net().state_dict(), assign=True),
        "replaced by another tensor: 0.weight, 0.bias, 2.weight",
    ),
    "in the optimizer": (replace_in_optimizer, "trained from now on: optimizer.0.0"),
    "frozen": (lambda m, o: m[2].requires_grad_(False), "no longer trained: 2.weight"),
    "layer added": (
        lambda m, o: m.append(nn.Linear(2, 2)),
        "trained from now on: 3.weight, 3.bias",
    ),
    "parameter added": (
        lambda m, o: m[2].register_parameter("bias", nn.Parameter(torch.zeros(2))),
        "trained from now on: 2.bias",
    ),
    "group added": (
        lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        "trained from now on: optimizer.1.0",
    ),
    "layer removed": (lambda m, o: m.__delitem__(2), "2.weight"),
    "parameter removed": (remove_parameter, "0.bias"),
}


@pytest.mark.parametrize(("change", "reported"), CHANGES.values(), ids=CHANGES.keys())
def test_what_is_a_change(model, optimizer, tracked, change, reported):
    before = tracked.group
    change(model, optimizer)
    assert tracked.changed()
    text = tracked.renew()
    assert text.startswith("the model's parameters have changed: ")
    assert reported in text
    assert not tracked.changed()
    assert tracked.group is not before
    assert tracked.group.table == "parameters@1"
    live = {id(p) for p in model.parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    assert {id(t) for t in tracked.group.tensors} == live | held


def test_an_optimizer_that_forgets_some(model, optimizer, tracked):
    """The model still has them, and says that they can be trained."""
    optimizer.param_groups[0]["params"].pop()
    assert tracked.changed()
    assert tracked.renew() == "the model's parameters have changed: another order"
    assert tracked.group.names == ("0.weight", "0.bias", "2.weight")


def test_each_change_has_a_table_of_its_own(model, optimizer, tracked):
    for number in range(1, 4):
        model.append(nn.Linear(2, 2))
        tracked.renew()
        assert tracked.group.table == f"parameters@{number}"


def test_a_long_list_is_cut_short(optimizer, model, tracked):
    for _ in range(4):
        model.append(nn.Linear(2, 2))
    text = tracked.renew()
    assert "3.weight, 3.bias, 4.weight, 4.bias, 5.weight and 3 more" in text


def test_roles(model, optimizer, tracked):
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__([p for g in inner.param_groups for p in g["params"]], {})

    body = Tracked(model, half := sgd(model[0].parameters()))
    assert tracked.role_of(optimizer) is Role.OWN
    assert tracked.role_of(Around(optimizer)) is Role.OWN
    assert tracked.role_of(sgd(net().parameters())) is Role.STRANGER
    assert body.role_of(half) is Role.OWN
    assert body.role_of(sgd(model[2].parameters())) is Role.OTHER


def test_declared_parts(model, tracked):
    tracked.declare("stage 1", "*")
    tracked.declare("expert 2", "2.*")
    assert tracked.group.described().shards == ("stage 1", "stage 1", "expert 2")
    assert tracked.group.table == "parameters"
    # What was declared holds for what comes later, too.
    model.append(nn.Linear(2, 2, bias=False))
    tracked.renew()
    assert tracked.group.described().shards == ("stage 1", "stage 1", "expert 2", "stage 1")


def test_a_copy_of_a_rank_s_own_stands_for_all(model, tracked):
    assert tracked.group.foremost == 0
    tracked.declare(f"{RANK_LOCAL}3", "2.*")
    assert tracked.group.names[tracked.group.foremost] == "2.weight"
    assert tracked.group.described().shards == ("", "", f"{RANK_LOCAL}3")
    tracked.declare("stage 1", "*")
    assert tracked.group.foremost == 0


def test_what_the_optimizer_holds_and_is_frozen_on_the_way(model, optimizer, tracked):
    assert tracked.frozen == ()
    model[0].requires_grad_(False)
    tracked.renew()
    assert tracked.frozen == ("0.weight", "0.bias")
    model[0].weight.requires_grad_(True)
    tracked.renew()
    assert tracked.frozen == ("0.bias",)


def test_what_another_optimizer_trains_may_be_switched_off(model):
    tracked = Tracked(model, sgd(model[2].parameters()))
    model[0].requires_grad_(False)
    tracked.renew()
    assert tracked.frozen == ()
