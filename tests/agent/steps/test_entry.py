"""Models whose own forward is never called: the module that is given the batch stands for them."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, CLASSES, SIZE = 12, 3, 6


class Methods(nn.Module):
    """Trained by its methods alone; what is given first is the same at every step."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(WIDTH, 8)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        raise AssertionError("not called")

    def classify(self, x):
        shift = self.positions(torch.arange(WIDTH)).mean(0)
        return self.head(self.encoder(x) + shift)


def container():
    return nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU()),
            "head": nn.Linear(8, CLASSES),
        }
    )


def train(watching, model, call, steps=8):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watching.attach(model, optimizer)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(SIZE, WIDTH, generator=generator)
        y = torch.randint(0, CLASSES, (SIZE,), generator=generator)
        functional.cross_entropy(call(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return monitor


def inputs_of(step):
    x = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
    return float(x.square().mean().sqrt())


def test_of_a_container_the_batches_are_seen(watching):
    model = container()
    train(watching, model, lambda x: model["head"](model["encoder"](x)))
    seen = watching.points("input_rms")
    # The search takes two steps and begins when one has shown that the forward is not called.
    assert sorted(seen) == list(range(3, 8))
    assert all(abs(seen[step] - inputs_of(step)) < 1e-5 for step in seen)
    assert watching.points("samples") == dict.fromkeys(range(3, 8), float(SIZE))


def test_units_of_a_container_are_seen(watching):
    model = container()
    with torch.no_grad():
        model["encoder"][0].bias.fill_(-100.0)  # every ReLU is off
    train(watching, model, lambda x: model["head"](model["encoder"](x)))
    layers = [one for batch in watching.batches() for one in batch.layers]
    dead = [one.values.tolist() for one in layers if one.metric == "dead_units"]
    assert len(dead) == 5
    assert all(values == [1.0] for values in dead)


def test_where_methods_are_called_the_input_that_changes_is_the_batch(watching):
    model = Methods()
    train(watching, model, model.classify)
    seen = watching.points("input_rms")
    assert sorted(seen) == list(range(3, 8))
    assert all(abs(seen[step] - inputs_of(step)) < 1e-5 for step in seen)


def test_of_two_inputs_that_change_neither_is_taken(watching):
    model = container()
    model["grid"] = nn.Linear(2, 8)

    def call(x):
        grid = torch.arange(2.0 * WIDTH).view(-1, 2) + float(x[0, 0])  # another one at each step
        return model["head"](model["encoder"](x) + model["grid"](grid).mean(0))

    train(watching, model, call)
    assert watching.points("input_rms") == {}
    assert not any(module._forward_pre_hooks for name, module in model.named_modules() if name)


def test_a_step_before_the_first_pass_does_not_take_the_hook_from_a_model_that_is_called(watching):
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching.attach(model, optimizer)
    optimizer.step()  # as some warm a scheduler up
    for step in range(1, 6):
        x = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = watching.points("input_rms")
    assert sorted(seen) == list(range(1, 6))
    assert all(abs(seen[step] - inputs_of(step)) < 1e-5 for step in seen)


def test_gradients_by_torch_func_are_recorded_to_the_end(watching):
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching.attach(model, optimizer)
    named = dict(model.named_parameters())

    def loss_of(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).square().mean()

    for step in range(8):
        x = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
        held = {name: p.detach() for name, p in named.items()}
        made = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(held, x)
        for name, parameter in named.items():
            parameter.grad = made[name].mean(0)
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(watching.points("grad_norm")) == list(range(8))
    assert not any(module._forward_pre_hooks for name, module in model.named_modules() if name)


def test_no_hook_of_the_search_is_left(watching):
    model = Methods()
    monitor = train(watching, model, model.classify)
    held = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    assert held in ([], ["encoder"])
    monitor.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_is_called_is_left_alone(watching):
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    train(watching, model, model)
    held = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    assert held in ([], [""])
