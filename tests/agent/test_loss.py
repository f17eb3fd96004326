"""Loss and accuracy as people train, against values computed beside the training."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.losses import batch, net


def hand_written(scores, target):
    return -torch.log_softmax(scores, 1)[range(len(target)), target].mean()


LOSSES = {
    "cross entropy": functional.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "squares": lambda o, y: functional.mse_loss(o, functional.one_hot(y, 3).float()),
    "by hand": hand_written,
    "own mean of a sum": lambda o, y: functional.cross_entropy(o, y, reduction="sum") / len(y),
    "own mean": lambda o, y: functional.cross_entropy(o, y, reduction="none").mean(),
}


@pytest.mark.parametrize("criterion", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("scale", [2.0, 1024.0, 65536.0])
@pytest.mark.parametrize("divide", [1, 2])
def test_a_grad_scaler_is_taken_out(watch, criterion, scale, divide):
    model = net()
    harness = watch(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
    for step in range(2):
        losses = []
        for micro in range(divide):
            x, y = batch(2 * step + micro)
            loss = criterion(model(x), y)
            losses.append(loss.item())
            scaler.scale(loss / divide if divide > 1 else loss).backward()
        scaler.step(harness.optimizer)
        scaler.update()
        harness.optimizer.zero_grad()
        assert harness.value("loss") == pytest.approx(sum(losses) / divide, rel=1e-6)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda loss: loss * 4096.0,
        lambda loss: torch.tensor(4096.0) * loss,
        lambda loss: loss / (1 / 4096),
        lambda loss: (4096.0 * loss) / 2 * 2,
    ],
)
def test_a_loss_scale_by_hand_is_taken_out(watch, scaled):
    model = net()
    harness = watch(model)
    x, y = batch()
    loss = functional.cross_entropy(model(x), y)
    scaled(loss).backward()
    harness.optimizer.step()
    assert harness.value("loss") == pytest.approx(loss.item())


def test_a_quotient_with_the_loss_below_is_what_it_is(watch):
    model = net()
    harness = watch(model)
    x, y = batch()
    root = torch.tensor(3000.0) / functional.cross_entropy(model(x), y)
    root.backward()
    harness.optimizer.step()
    assert harness.value("loss") == root.item()


def test_a_step_that_the_scaler_skips_leaves_no_loss_to_the_next(watch):
    model = net()
    harness = watch(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    values = []
    for factor in (float("inf"), 1.0):
        x, y = batch()
        loss = functional.cross_entropy(model(x), y) * factor
        values.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(harness.optimizer)
        scaler.update()
        harness.optimizer.zero_grad()
    assert len(harness.steps) == 1
    assert harness.value("loss") == values[1]


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_each_of_a_gans_two_has_its_own_loss(watch, freeze, together):
    generator, judge = nn.Linear(4, 6), net(1)
    both = nn.ModuleDict({"g": generator, "d": judge})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, judge)]
    watched = (both, both) if together else (generator, judge)
    of_g, of_d = (watch(m, o) for m, o in zip(watched, optimizers, strict=True))
    bce = nn.BCEWithLogitsLoss()
    real, fake = torch.ones(5, 1), torch.zeros(5, 1)
    for seed in range(3):
        optimizers[1].zero_grad()
        first = bce(judge(batch(seed)[0]), real)
        first.backward()
        made = generator(torch.randn(5, 4))
        second = bce(judge(made.detach()), fake)
        second.backward()
        optimizers[1].step()
        judge.requires_grad_(not freeze)
        optimizers[0].zero_grad()
        third = bce(judge(made), real)
        third.backward()
        optimizers[0].step()
        judge.requires_grad_(True)
        assert of_d.value("loss") == pytest.approx(first.item() + second.item())
        assert of_g.value("loss") == third.item()


def test_a_second_model_that_nobody_watches_does_not_count(watch):
    model, other = net(), net(seed=1)
    harness = watch(model)
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    for seed in range(3):
        losses = []
        for trained in (other, model, other):
            x, y = batch(seed)
            loss = functional.cross_entropy(trained(x) * (2 if trained is other else 1), y)
            loss.backward()
            losses.append(loss.item())
        for optimizer in (elsewhere, harness.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        assert harness.value("loss") == losses[1]


def test_gradients_that_are_thrown_away_have_no_loss(watch):
    model = net()
    harness = watch(model)
    x, y = batch()
    x.requires_grad_()
    functional.cross_entropy(model(x), y).backward()
    changed = (x + 0.5 * x.grad.sign()).detach()
    harness.optimizer.zero_grad()
    loss = functional.cross_entropy(model(changed), y)
    loss.backward()
    harness.optimizer.step()
    assert harness.value("loss") == loss.item()


def test_backward_for_the_inputs_alone_is_no_training(watch):
    model = net()
    harness = watch(model)
    x, y = batch()
    x.requires_grad_()
    first = functional.cross_entropy(model(x), y)
    first.backward(inputs=[x])
    loss = functional.cross_entropy(model(x + 10 * x.grad), y)
    loss.backward()
    harness.optimizer.step()
    assert first.item() != loss.item()
    assert harness.value("loss") == loss.item()


def test_training_in_evaluation_mode_is_training(watch):
    model = net()
    harness = watch(model)
    model.eval()
    for seed in range(3):
        x, y = batch(seed)
        scores = model(x)
        loss = functional.cross_entropy(scores, y)
        loss.backward()
        harness.optimizer.step()
        harness.optimizer.zero_grad()
        assert harness.value("loss") == loss.item()
        assert harness.value("accuracy") == (scores.argmax(1) == y).double().mean().item()
        assert not harness.loss.evaluated
        assert harness.loss.evaluation() == {}
    with torch.no_grad():
        validation = functional.cross_entropy(model(x), y)
    assert harness.loss.evaluated
    assert harness.loss.evaluation()["eval/loss"] == validation.item()


@pytest.mark.parametrize("grad", [False, True])
def test_the_mode_of_the_model_inside_a_wrapper_counts(watch, grad):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    wrapper = Wrapper(net())
    harness = watch(wrapper)
    wrapper.module.eval()
    x, y = batch()
    with torch.set_grad_enabled(grad):
        loss = functional.cross_entropy(wrapper.module(x), y)
    assert wrapper.training
    assert harness.loss.evaluation()["eval/loss"] == loss.item()


def test_nothing_is_right_where_nothing_is_asked(watch):
    model = net()
    harness = watch(model)
    x, y = batch()
    loss = functional.cross_entropy(model(x), torch.full_like(y, -100), reduction="sum")
    loss.backward()
    harness.optimizer.step()
    assert "accuracy" not in harness.steps[0].scalars
    assert harness.value("loss") == 0.0
    model.eval()
    with torch.no_grad():
        functional.cross_entropy(model(x), torch.full_like(y, -100), reduction="sum")
    assert set(harness.loss.evaluation()) == {"eval/loss"}


def test_an_evaluation_with_two_criteria_is_of_the_trained_one(watch):
    model = net()
    harness = watch(model)
    criterion, other = nn.CrossEntropyLoss(), nn.MSELoss()
    x, y = batch()
    criterion(model(x), y).backward()
    harness.optimizer.step()
    model.eval()
    total = count = right = 0
    for seed, size in enumerate((4, 7, 1)):
        x, y = batch(seed, size)
        with torch.no_grad():
            scores = model(x)
            other(scores, functional.one_hot(y, 3).float())
            total += criterion(scores, y).item() * size
            right += (scores.argmax(1) == y).sum().item()
            count += size
    means = harness.loss.evaluation()
    assert means["eval/loss"] == pytest.approx(total / count)
    assert means["eval/accuracy"] == pytest.approx(right / count)


def test_of_two_uses_of_one_criterion_the_first_counts(watch):
    model = net()
    harness = watch(model)
    model.eval()
    x, y = batch()
    first = []
    for _ in range(3):
        with torch.no_grad():
            scores = model(x)
            first.append(functional.cross_entropy(scores, y).item())
            functional.cross_entropy(scores * 9, y)
    assert harness.loss.evaluation()["eval/loss"] == pytest.approx(first[0])


def test_sums_over_the_samples_are_divided_by_them(watch):
    model = net()
    harness = watch(model)
    x, y = batch(size=7)
    functional.cross_entropy(model(x), y).backward()
    harness.optimizer.step()
    model.eval()
    with torch.no_grad():
        for part in (slice(0, 5), slice(5, 7)):
            functional.cross_entropy(model(x[part]), y[part], reduction="sum")
    means = harness.loss.evaluation()
    with torch.no_grad():
        expected = functional.cross_entropy(model(x), y).item()
    assert means["eval/loss"] == pytest.approx(expected)


def test_a_smaller_last_group_is_divided_by_the_same_number(watch):
    model = net()
    harness = watch(model)
    for group in ((0, 1, 2, 3), (4, 5), (6,)):
        losses = []
        for seed in group:
            x, y = batch(seed)
            loss = functional.cross_entropy(model(x), y)
            losses.append(loss.item())
            (loss / 4).backward()
        harness.optimizer.step()
        harness.optimizer.zero_grad()
        assert harness.value("loss") == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_the_loss_of_a_closure_is_that_of_its_first_call(watch, to_none, line_search):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn=line_search)
    harness = watch(model, optimizer)
    x, y = batch()

    def closure():
        optimizer.zero_grad(set_to_none=to_none)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        returned = optimizer.step(closure)
        assert harness.value("loss") == returned.item()


def test_backwards_before_a_closure_belong_to_its_step(watch):
    model = net()
    harness = watch(model)
    losses = []

    def micro(seed):
        x, y = batch(seed)
        loss = functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        (loss / 2).backward()
        return loss

    micro(0)
    harness.optimizer.step(lambda: micro(1))
    assert harness.value("loss") == pytest.approx(sum(losses) / 2)


def test_a_step_that_was_not_sampled_leaves_nothing_to_the_next(watch):
    model = net()
    harness = watch(model)
    probe, context = harness.loss, harness.context
    x, y = batch()
    for step, sampled in enumerate((True, False, False, True)):
        context.count.step, context.basic, context.signals = step, sampled, sampled
        harness.probes = [probe] if sampled else []
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        assert len(probe.passes) == sampled
        harness.optimizer.step()
        harness.optimizer.zero_grad(set_to_none=False)
    assert harness.value("loss") == loss.item()
    assert not probe.passes


@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_beside_a_compiled_model_is_seen(watch):
    model = net()
    harness = watch(model)
    compiled = torch.compile(model, backend="eager")
    compiled.eval()
    x, y = batch()
    with torch.no_grad():
        loss = functional.cross_entropy(compiled(x), y)
    assert harness.loss.evaluated
    assert harness.loss.evaluation()["eval/loss"] == pytest.approx(loss.item())


class WithLoss(nn.Module):
    """Returns its own loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, labels):
        scores = self.inner(x)
        loss = functional.cross_entropy(scores, labels) + 0.5 * scores.square().mean()
        return {"loss": loss, "logits": scores}


def test_a_models_own_loss_is_the_loss(watch):
    model = WithLoss()
    harness = watch(model)
    x, y = batch()
    loss = model(x, labels=y)["loss"]
    loss.backward()
    harness.optimizer.step()
    assert harness.value("loss") == loss.item()
    model.eval()
    losses = []
    with torch.no_grad():
        for size in (4, 2):
            x, y = batch(size, size)
            output = model(x, labels=y)
            losses.append(output["loss"].item() * size)
    copy.deepcopy(model)
    pickle.dumps(model)
    means = harness.loss.evaluation()
    assert means["eval/loss"] == pytest.approx(sum(losses) / 6)
    assert "eval/accuracy" in means
    model.train()
    model(x, labels=y)
    assert not model._forward_hooks


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss: torch.autograd.backward(loss),
        lambda loss: torch.autograd.backward([loss]),
        lambda loss: torch.autograd.backward(tensors=(loss,)),
        lambda loss: loss.backward(retain_graph=True),
        lambda loss: loss.backward(torch.ones(())),
        lambda loss: loss.backward(create_graph=True),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_every_way_to_call_backward(watch, backward):
    model = net()
    harness = watch(model)
    x, y = batch()
    loss = functional.cross_entropy(model(x), y)
    backward(loss)
    harness.optimizer.step()
    assert harness.value("loss") == loss.item()
    model.zero_grad()


def test_the_sum_of_two_roots(watch):
    model = net()
    harness = watch(model)
    x, y = batch()
    first, second = functional.cross_entropy(model(x), y), model(x).square().mean()
    torch.autograd.backward([first, second])
    harness.optimizer.step()
    assert harness.value("loss") == pytest.approx(first.item() + second.item())


def test_a_loss_module_that_calls_another(watch):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.CrossEntropyLoss()

        def forward(self, scores, target):
            return self.inner(scores, target) + 0.1 * functional.l1_loss(scores, scores * 0)

    model = net()
    harness = watch(model)
    x, y = batch()
    scores = model(x)
    loss = Outer()(scores, y)
    loss.backward()
    harness.optimizer.step()
    assert harness.value("loss") == loss.item()
    assert harness.value("accuracy") == (scores.argmax(1) == y).double().mean().item()


def reconstructing(watch, target, *, loss=functional.binary_cross_entropy_with_logits):
    """The step in which a model of 64 outputs is trained to give `target` back."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    harness = watch(model)
    scores = model(target.float())
    loss(scores if "logits" in loss.__name__ else scores.sigmoid(), target).backward()
    harness.optimizer.step()
    return harness, scores.detach()


@pytest.mark.parametrize(
    "loss", [functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits]
)
def test_pixels_that_are_given_back_are_no_classes(watch, loss):
    pixels = torch.rand(12, 64).square()
    pixels[:, ::2] = 0  # most of an image is background
    harness, _ = reconstructing(watch, pixels, loss=loss)
    assert "loss" in harness.steps[0].scalars
    assert "accuracy" not in harness.steps[0].scalars


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.05, 0.95), (0.0, 0.3, 0.7, 1.0)])
def test_labels_that_are_smoothed_or_mixed_are_classes(watch, values):
    target = torch.tensor(values)[torch.randint(0, len(values), (12, 64))]
    harness, scores = reconstructing(watch, target)
    right = ((scores > 0) == (target > 0.5)).double().mean().item()
    assert harness.value("accuracy") == pytest.approx(right)
