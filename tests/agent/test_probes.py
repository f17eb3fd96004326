"""What each probe reads off a real training loop, against values computed by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.model.facts import plain_name
from tests.support.probe_harness import Harness


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def harness(model):
    made = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1))
    yield made
    made.close()


def batch(seed=0, size=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(
        0, 3, (size,), generator=generator
    )


def train_step(model, optimizer, criterion, seed=0, divide=1):
    x, y = batch(seed)
    output = model(x)
    loss = criterion(output, y)
    (loss / divide if divide > 1 else loss).backward()
    return float(loss.detach()), float((output.argmax(1) == y).float().mean())


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        lambda o, y: functional.cross_entropy(o, y),
        lambda o, y: functional.nll_loss(functional.log_softmax(o, 1), y),
    ],
    ids=["module", "function", "nll function"],
)
def test_loss_and_accuracy_come_by_themselves(model, harness, criterion):
    for seed in range(3):
        loss, accuracy = train_step(model, harness.optimizer, criterion, seed)
        harness.optimizer.step()
        harness.optimizer.zero_grad()
        assert harness.value("loss") == pytest.approx(loss, rel=1e-6)
        assert harness.value("accuracy") == pytest.approx(accuracy)


def test_the_sum_of_two_losses_is_what_is_trained_on(model, harness):
    x, y = batch()
    output = model(x)
    loss = nn.CrossEntropyLoss()(output, y) + 0.1 * nn.MSELoss()(output, torch.zeros(5, 3))
    loss.backward()
    harness.optimizer.step()
    assert harness.value("loss") == pytest.approx(float(loss.detach()))
    assert harness.value("accuracy") == pytest.approx(float((output.argmax(1) == y).float().mean()))


def test_a_weighted_loss_is_the_weighted_one(model, harness):
    x, y = batch()
    loss = 0.5 * functional.cross_entropy(model(x), y)
    loss.backward()
    harness.optimizer.step()
    assert harness.value("loss") == pytest.approx(float(loss.detach()))


def imported_before(output, target, _function=functional.cross_entropy):
    """A function that the trainer held before the agent came: only `backward` is seen."""
    return _function(output, target)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), imported_before])
@pytest.mark.parametrize("divide", [1, 4])
def test_accumulation_records_the_mean_over_micro_batches(model, harness, criterion, divide):
    losses = [train_step(model, harness.optimizer, criterion, seed, divide)[0] for seed in range(4)]
    harness.optimizer.step()
    assert harness.value("loss") == pytest.approx(sum(losses) / 4, rel=1e-6)


def test_a_scaled_loss_is_recorded_unscaled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer)
    try:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x, y = batch()
        loss = nn.CrossEntropyLoss()(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert harness.value("loss") == pytest.approx(float(loss.detach()))
    finally:
        harness.close()


def test_a_closure_steps_once(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    harness = Harness(model, optimizer)
    try:
        x, y = batch()

        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert len(harness.steps) == 1
        assert 0 < harness.value("loss") < 3
    finally:
        harness.close()


def test_gradient_norms_are_those_of_the_applied_and_of_the_local_gradient(model, harness):
    train_step(model, harness.optimizer, nn.CrossEntropyLoss())
    local = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    harness.optimizer.step()
    assert harness.value("grad_norm") == pytest.approx(0.01, rel=1e-3)
    assert harness.value("grad_norm_local") == pytest.approx(float(local), rel=1e-5)


def test_local_norm_of_accumulated_gradients(model, harness):
    for step in range(2):  # the first step teaches how many micro-batches to expect
        harness.optimizer.zero_grad()
        for seed in range(3):
            train_step(model, harness.optimizer, nn.CrossEntropyLoss(), seed=10 * step + seed)
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        harness.optimizer.step()
    assert harness.value("grad_norm_local") == pytest.approx(float(expected), rel=1e-5)


def test_digests_follow_the_parameters(model, harness):
    digests = []
    for _ in range(3):
        train_step(model, harness.optimizer, nn.CrossEntropyLoss())
        harness.optimizer.step()
        harness.optimizer.zero_grad()
        digests.append(harness.steps[-1].digests["parameters"])
    assert len({harness.start.digests["start"], *digests}) == 4
    assert all(s.digests["outside_optimizer"] == 0 for s in harness.steps)


def test_a_write_outside_the_optimizer_is_seen_at_the_next_step(model, harness):
    for step in range(4):
        train_step(model, harness.optimizer, nn.CrossEntropyLoss())
        if step == 2:
            with torch.no_grad():
                model[0].weight.view(torch.int32).view(-1)[3] ^= 1 << 5
        harness.optimizer.step()
        harness.optimizer.zero_grad()
    changed = [s.digests["outside_optimizer"] != 0 for s in harness.steps]
    assert changed == [False, False, True, False]


def test_fingerprints_describe_every_tensor(model, harness):
    train_step(model, harness.optimizer, nn.CrossEntropyLoss())
    harness.optimizer.step()
    fingerprints = {p.stage: p for p in harness.steps[0].fingerprints}
    assert {"local_gradient", "reduced_gradient", "parameters"} <= set(fingerprints)
    assert fingerprints["parameters"].digests.shape == (4,)
    assert fingerprints["parameters"].sketches.shape[0] == 4


def test_evaluation_is_kept_separate(model, harness):
    criterion = nn.CrossEntropyLoss()
    train_step(model, harness.optimizer, criterion)
    harness.optimizer.step()
    model.eval()
    losses, hits, count = [], 0, 0
    with torch.no_grad():
        for seed, size in ((1, 4), (2, 8)):
            x, y = batch(seed, size)
            output = model(x)
            losses.append(float(criterion(output, y)) * size)
            hits += int((output.argmax(1) == y).sum())
            count += size
    model.train()
    trained, _ = train_step(model, harness.optimizer, criterion, seed=5)
    means = harness.loss.evaluation()
    harness.optimizer.step()
    assert float(means["eval/loss"]) == pytest.approx(sum(losses) / count)
    assert float(means["eval/accuracy"]) == pytest.approx(hits / count)
    assert harness.value("loss") == pytest.approx(trained)
    assert harness.loss.evaluation() == {}


def test_learning_rates_of_groups_that_differ(model):
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.5
    )
    harness = Harness(model, optimizer)
    try:
        train_step(model, optimizer, nn.CrossEntropyLoss())
        optimizer.step()
        assert harness.value("lr") == 0.1
        assert harness.value("lr/1") == 0.5
    finally:
        harness.close()


def test_step_time_and_throughput(model, harness):
    for _ in range(3):
        train_step(model, harness.optimizer, nn.CrossEntropyLoss())
        harness.optimizer.step()
    assert "step_seconds" not in harness.steps[0].scalars
    seconds = harness.value("step_seconds")
    assert seconds > 0
    assert harness.value("samples_per_second") == pytest.approx(5 / seconds)


def test_everything_is_given_back(model):
    loss_call = nn.CrossEntropyLoss.__call__
    backward = torch.autograd.backward.__code__
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.autograd.backward.__code__ is not backward
    harness.close()
    assert torch.autograd.backward.__code__ is backward
    assert nn.CrossEntropyLoss.__call__ is loss_call
    assert not model._forward_pre_hooks
    assert all(not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "plain"),
    [("module.a.weight", "a.weight"), ("_orig_mod.module.a", "a"), ("a.module.b", "a.module.b")],
)
def test_wrappers_leave_no_trace_in_names(given, plain):
    assert plain_name(given) == plain


def test_activation_checkpointing_runs_the_forward_pass_as_often_as_without(model):
    from torch.utils.checkpoint import checkpoint

    def run(watched):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        made = Harness(net, optimizer) if watched else None
        for seed in range(3):
            x, y = batch(seed)
            loss = checkpoint(
                lambda x, y: functional.cross_entropy(net(x), y), x, y, use_reentrant=False
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if made:
            made.close()
        return net.state_dict()

    plain, watched = run(False), run(True)
    assert all(torch.equal(plain[k], watched[k]) for k in plain)


def test_a_loss_that_is_changed_in_place_is_the_one_that_was_computed(model, harness):
    losses = []
    for seed in range(4):
        x, y = batch(seed)
        loss = nn.CrossEntropyLoss()(model(x), y)
        losses.append(float(loss.detach()))
        loss /= 4
        loss.backward()
        with torch.no_grad():
            loss.mul_(100)
    harness.optimizer.step()
    assert harness.value("loss") == pytest.approx(sum(losses) / 4, rel=1e-6)


def test_a_loss_weighted_with_nothing_does_not_stop_the_recording(model, harness):
    for weight in (0.0, 1.0):
        x, y = batch()
        loss = functional.cross_entropy(model(x), y)
        (loss * weight).backward()
        harness.optimizer.step()
    assert harness.value("loss") == pytest.approx(float(loss.detach()))


def test_another_librarys_patch_of_backward_is_called_and_stays(model):
    original, calls = torch.Tensor.backward, []

    def theirs(self, *args, **kwargs):
        calls.append(1)
        original(self, *args, **kwargs)

    torch.Tensor.backward = theirs
    try:
        harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train_step(model, harness.optimizer, nn.CrossEntropyLoss())
        harness.close()
        assert calls == [1]
        assert torch.Tensor.backward is theirs
    finally:
        torch.Tensor.backward = original
