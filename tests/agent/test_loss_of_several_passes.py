"""A step of several backward passes: its loss is what the trainer prints."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.probes.loss.step_loss import loss_of
from tests.support.watching import CLASSES, FEATURES, net

MICRO = 4


def batch(seed, size=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def batches(step):
    return [batch(MICRO * step + micro, size=3 + micro) for micro in range(MICRO)]


def divided(model, given):
    """The mean of the micro-batches' losses."""
    printed = 0.0
    for x, y in given:
        loss = functional.cross_entropy(model(x), y) / len(given)
        loss.backward()
        printed += loss.item()
    return printed


def by_tokens(model, given):
    """Sums over the number of targets in all micro-batches, as language models are trained."""
    printed, items = 0.0, sum((y != -100).sum() for _, y in given)
    for x, y in given:
        loss = functional.cross_entropy(model(x), y, reduction="sum") / items
        loss.backward()
        printed += loss.item()
    return printed


def by_tokens_with_ignored(model, given):
    cut = [(x, torch.where(torch.arange(len(y)) == 0, -100, y)) for x, y in given]
    return by_tokens(model, cut)


def by_tokens_of_all_ranks(model, given):
    """Sums over the number of targets on two ranks, times two, as the ranks are averaged."""
    printed, items = 0.0, 2 * sum(len(y) for _, y in given)
    for x, y in given:
        loss = functional.cross_entropy(model(x), y, reduction="sum") / items * 2
        loss.backward()
        printed += loss.item()
    return printed


def by_elements(model, given):
    printed, elements = 0.0, sum(CLASSES * len(y) for _, y in given)
    for x, _ in given:
        loss = model(x).square().sum() / elements
        loss.backward()
        printed += loss.item()
    return printed


def own_means_of_sums(model, given):
    losses = []
    for x, y in given:
        loss = functional.cross_entropy(model(x), y, reduction="sum") / len(y)
        loss.backward()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def sums_over_a_batch_size(model, given):
    """Each is summed over more than what it is divided by: over classes, say."""
    losses = []
    for x, _ in given:
        loss = functional.mse_loss(model(x), torch.ones(len(x), CLASSES), reduction="sum") / 3
        loss.backward()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def undivided(model, given):
    losses = []
    for x, y in given:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
    for parameter in model.parameters():
        parameter.grad /= len(given)
    return sum(losses) / len(losses)


def forward_first(model, given):
    losses = [functional.cross_entropy(model(x), y) for x, y in given]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses) / len(losses)


def divided_parts(model, given):
    """What is added up was divided before."""
    printed = 0.0
    for x, y in given:
        scores = model(x)
        loss = functional.cross_entropy(scores, y) / MICRO + scores.square().mean() / MICRO
        loss.backward()
        printed += loss.item()
    return printed


def divided_beside(model, given):
    losses = []
    for x, y in given:
        loss = functional.cross_entropy(model(x), y)
        loss.backward(torch.tensor(1 / MICRO))
        losses.append(loss.item())
    return sum(losses) / MICRO


def real_and_made(model, given):
    """A discriminator's two objectives."""
    (real, one), (made, other) = given[:2]
    first = functional.cross_entropy(model(real), one)
    first.backward()
    second = functional.cross_entropy(model(made.detach()), other)
    second.backward()
    return (first + second).item()


def with_signs(model, given):
    """A critic's: what is made counts against what is real."""
    first = model(given[0][0]).mean()
    first.backward(torch.tensor(1.0))
    second = model(given[1][0]).mean()
    second.backward(torch.tensor(-1.0))
    return (first - second).item()


def two_tasks(model, given):
    x, y = given[0]
    scores = model(x)
    losses = (functional.cross_entropy(scores, y), scores.square().mean())
    for loss in losses:
        loss.backward(retain_graph=True)
    return sum(losses).item()


def two_tasks_accumulated(model, given):
    totals = []
    for x, y in given:
        scores = model(x)
        losses = (functional.cross_entropy(scores, y), scores.square().mean())
        for loss in losses:
            loss.backward(retain_graph=True)
        totals.append(sum(losses).item())
    return sum(totals) / len(totals)


def real_and_made_accumulated(model, given):
    printed = 0.0
    for x, y in given:
        first = functional.cross_entropy(model(x), y) / MICRO
        first.backward()
        second = model(-x).square().mean() / MICRO
        second.backward()
        printed += (first + second).item()
    return printed


WAYS = [
    divided,
    by_tokens,
    by_tokens_with_ignored,
    by_tokens_of_all_ranks,
    by_elements,
    own_means_of_sums,
    sums_over_a_batch_size,
    undivided,
    forward_first,
    divided_parts,
    divided_beside,
    real_and_made,
    with_signs,
    two_tasks,
    two_tasks_accumulated,
    real_and_made_accumulated,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_loss_of_a_step_is_what_its_trainer_prints(watching, way):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watching.attach(model, optimizer)
    printed = {}
    for step in range(5):
        optimizer.zero_grad()
        printed[step] = way(model, batches(step))
        optimizer.step()
    assert watching.points("loss") == pytest.approx(printed, rel=1e-5)


def test_a_loop_that_always_ends_early_is_divided_by_its_number_all_the_same(watching):
    """Three batches in an epoch, divided by eight."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watching.attach(model, optimizer)
    printed = {}
    for step in range(3):
        optimizer.zero_grad()
        losses = []
        for x, y in batches(step)[:3]:
            loss = functional.cross_entropy(model(x), y)
            (loss / 8).backward()
            losses.append(loss.item())
        optimizer.step()
        printed[step] = sum(losses) / 3
    assert watching.points("loss") == pytest.approx(printed, rel=1e-5)


def test_under_no_sync_losses_that_are_not_divided_are_micro_batches(watching, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        watching.attach(model, optimizer)
        printed = {}
        for step in range(4):
            optimizer.zero_grad()
            given, losses = batches(step), []
            with model.no_sync():
                for x, y in given[:-1]:
                    losses.append(functional.cross_entropy(model(x), y))
                    losses[-1].backward()
            x, y = given[-1]
            losses.append(functional.cross_entropy(model(x), y))
            losses[-1].backward()
            optimizer.step()
            printed[step] = sum(loss.item() for loss in losses) / len(losses)
        assert watching.points("loss") == pytest.approx(printed, rel=1e-5)
    finally:
        torch.distributed.destroy_process_group()


def test_what_the_user_logs_wins(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = watching.attach(model, optimizer)
    printed = {}
    for step in range(3):
        optimizer.zero_grad()
        # One loop through the objectives, each with a forward pass of its own.
        total = 0.0
        for x, y in batches(step):
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            total += loss.item()
        monitor.log(loss=total)
        optimizer.step()
        printed[step] = total
    assert watching.points("loss") == pytest.approx(printed, rel=1e-5)


@pytest.mark.parametrize("after", [False, True], ids=["before the step", "after it"])
def test_an_accuracy_that_is_logged_has_the_one_that_is_counted_beside_it(watching, after):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = watching.attach(model, optimizer)
    counted = {}
    for step in range(4):
        optimizer.zero_grad()
        x, y = next(iter(batches(step)))
        scores = model(x)
        functional.cross_entropy(scores, y).backward()
        if not after:
            monitor.log(accuracy=0.25)
        optimizer.step()
        if after:
            monitor.log(accuracy=0.25)
        counted[step] = (scores.argmax(1) == y).float().mean().item()
    assert watching.points("accuracy") == dict.fromkeys(range(4), 0.25)
    # That a trainer logs one is known once it does so for the first time.
    if after:
        del counted[0]
    assert watching.points("accuracy_counted") == pytest.approx(counted)


def test_a_trainer_that_says_how_it_divides_is_believed(watching):
    """A single micro-batch, divided by the number that the others of its size would have."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = watching.attach(model, optimizer)
    monitor.accumulation(divided_by=8)
    x, y = batch(0)
    loss = functional.cross_entropy(model(x), y)
    (loss / 8).backward()
    optimizer.step()
    monitor.accumulation(summed=True)
    parts = []
    for x, y in batches(1)[:3]:
        parts.append(functional.cross_entropy(model(x), y) / 8)
        parts[-1].backward()
    optimizer.step()
    expected = {0: loss.item(), 1: sum(part.item() for part in parts)}
    assert watching.points("loss") == pytest.approx(expected, rel=1e-5)


def test_sums_on_a_device_are_distinguished_there():
    # What a device has is not read: it is decided on the device.
    def one(value, share):
        return (torch.tensor(value), 1.0, True, True, None, 0, 7, 1, torch.tensor(share).double())

    whole, _ = loss_of([one(1.0, 0.25), one(2.0, 0.75)])
    each, _ = loss_of([one(1.0, 1.0), one(2.0, 1.0)])
    assert (float(whole), float(each)) == (3.0, 1.5)
