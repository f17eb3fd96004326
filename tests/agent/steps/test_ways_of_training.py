"""The ways in which people train: what arrives is what was done, step by step."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.watching import CLASSES, FEATURES, Diary, net


def batch(seed, size=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def loss_of(model, seed):
    x, y = batch(seed)
    return functional.cross_entropy(model(x), y)


# ---------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("divided", [True, False])
def test_accumulation_is_one_step(watching, divided):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    for step in range(6):
        losses = [loss_of(model, 10 * step + micro) for micro in range(3)]
        for loss in losses:
            (loss / 3 if divided else loss).backward()
        optimizer.step()
        diary.step(*losses)
        optimizer.zero_grad()
    diary.check(watching)
    assert watching.points("micro_steps") == dict.fromkeys(range(6), 3.0)


def test_a_last_group_of_micro_batches_that_is_smaller(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    for step, group in enumerate((4, 4, 3, 4, 1)):
        losses = [loss_of(model, 10 * step + micro) for micro in range(group)]
        for loss in losses:
            (loss / 4).backward()
        optimizer.step()
        diary.step(*losses)
        optimizer.zero_grad()
    diary.check(watching)
    assert watching.points("micro_steps") == dict(enumerate((4.0, 4.0, 3.0, 4.0, 1.0)))


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("no_sync", [True, False])
def test_accumulation_under_ddp(watching, one_process, no_sync):
    inner = net()
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watching.attach(model, optimizer)
    diary = Diary(inner)
    for step in range(6):
        optimizer.zero_grad()
        if no_sync:
            with model.no_sync():
                first = loss_of(model, 10 * step)
                (first / 2).backward()
        else:
            first = loss_of(model, 10 * step)
            (first / 2).backward()
        second = loss_of(model, 10 * step + 1)
        (second / 2).backward()
        optimizer.step()
        diary.step(first, second)
    diary.check(watching)
    assert watching.points("micro_steps") == dict.fromkeys(range(6), 2.0)


# ---------------------------------------------------------------- several optimizers and closures


def adversaries():
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, FEATURES))
    discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))
    return (
        (generator, torch.optim.Adam(generator.parameters(), lr=0.01)),
        (discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.01)),
    )


def train_adversaries(makes, judges, rounds, critics, diaries):
    """A round: several steps of the discriminator, one of the generator."""
    (generator, first), (discriminator, second) = makes, judges
    judged = functional.binary_cross_entropy_with_logits
    for index in range(rounds):
        for critic in range(critics):
            second.zero_grad()
            real = batch(100 * index + critic)[0]
            made = generator(batch(index)[0][:, :4])
            loss = judged(discriminator(real), torch.ones(5, 1)) + judged(
                discriminator(made.detach()), torch.zeros(5, 1)
            )
            loss.backward()
            second.step()
            diaries[1].step(loss)
        first.zero_grad()
        made = generator(batch(7 * index)[0][:, :4])
        fooled = judged(discriminator(made), torch.ones(5, 1))
        fooled.backward()
        first.step()
        diaries[0].step(fooled)


def test_a_gan_with_an_attach_for_each(watching):
    torch.manual_seed(0)
    makes, judges = adversaries()
    monitors = watching.attach(*makes), watching.attach(*judges)
    assert [m.run for m in monitors] == ["run", "run.2"]
    diaries = Diary(makes[0]), Diary(judges[0])
    train_adversaries(makes, judges, 5, 3, diaries)
    assert [len(d.losses) for d in diaries] == [5, 15]
    diaries[0].check(watching, "run")
    diaries[1].check(watching, "run.2")


@pytest.mark.parametrize("attached", [0, 1])
def test_a_gan_with_one_attach_counts_no_steps_of_the_other(watching, attached):
    torch.manual_seed(0)
    pairs = adversaries()
    watching.attach(*pairs[attached])
    diaries = [Diary(model) for model, _ in pairs]
    train_adversaries(*pairs, 5, 3, diaries)
    diaries[attached].check(watching)
    assert watching.runs() == ["run"]


def test_two_optimizers_of_one_model_with_one_attach(watching):
    """The other one moves parameters that are watched: no step, and no write from outside."""
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    for step in range(6):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        diary.step(loss)
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    diary.check(watching)
    # Sampled before the other one has stepped for the first time, and never after.
    assert watching.model_digests("outside_optimizer") == {0: 0}


def test_two_optimizers_of_one_model_with_an_attach_for_each(watching):
    model = net()
    pairs = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    for optimizer in pairs:
        watching.attach(model, optimizer)
    diaries = [Diary(model), Diary(model)]
    for step in range(6):
        loss = loss_of(model, step)
        loss.backward()
        for optimizer, diary in zip(pairs, diaries, strict=True):
            optimizer.step()
            diary.step(loss)
        model.zero_grad()
    diaries[0].check(watching, "run")
    diaries[1].check(watching, "run.2")


def test_a_write_from_outside_is_seen_at_its_step(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    for step in range(6):
        if step == 3:
            with torch.no_grad():
                model[0].weight[0, 0] += 1e-3
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    changed = {s: bool(digest) for s, digest in watching.model_digests("outside_optimizer").items()}
    assert changed == {step: step == 3 for step in range(6)}


def test_lbfgs_steps_once_a_closure(watching):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    watching.attach(model, optimizer)
    diary = Diary(model)
    calls = []
    for step in range(6):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            calls.append(step)
            return loss

        diary.step(optimizer.step(closure))
    assert len(calls) > 6
    diary.check(watching)
    assert watching.points("micro_steps") == dict.fromkeys(range(6), 1.0)


# ------------------------------------------------------------------------------- mixed precision


def test_gradients_that_are_thrown_away_are_counted_with_the_next_step(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    for index in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, index)
        loss.backward()
        # The trainer checks for an overflow by itself.
        if index not in (3, 5, 6):
            optimizer.step()
            diary.step(loss)
    diary.check(watching)
    assert watching.points("passes_discarded") == {3: 1.0, 4: 2.0}
    assert watching.points("micro_steps") == dict.fromkeys(range(5), 1.0)
    assert watching.points("loss_divisor") == {}


def test_what_losses_are_divided_by_is_posted_with_the_gradients_thrown_away(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    for step in range(3):
        for index in range(4):
            optimizer.zero_grad()
            (loss_of(model, 4 * step + index) / 4).backward()
        optimizer.step()
    watching.close()
    assert watching.points("passes_discarded") == dict.fromkeys(range(3), 3.0)
    assert watching.points("loss_divisor") == dict.fromkeys(range(3), 4.0)


def test_what_losses_are_divided_by_is_posted_from_the_first_step_on_that_divides(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    for step in range(6):
        for micro in range(2):
            loss = loss_of(model, 2 * step + micro)
            (loss / 2 if 2 <= step < 4 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    watching.close()
    assert watching.points("loss_divisor") == {2: 2.0, 3: 2.0, 4: 1.0, 5: 1.0}
    assert watching.points("micro_steps") == dict.fromkeys(range(6), 2.0)


def test_skipped_steps_are_not_counted(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    watching.attach(model, optimizer)
    diary = Diary(model)
    scales, skipped = [], []
    for index in range(9):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, index)
        overflows = index in (2, 3, 6)
        scaler.scale(loss * math.inf if overflows else loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        if not overflows:
            diary.step(loss)
            scales.append(scale)
            skipped.append(index - len(skipped))
        scaler.update()
    assert scales == [1024.0, 1024.0, 256.0, 256.0, 128.0, 128.0]
    diary.check(watching)
    assert watching.points("amp_scale") == dict(enumerate(scales))
    assert watching.points("steps_skipped") == dict(enumerate(map(float, skipped)))
    assert watching.points("optimizer_steps") == {s: s + 1.0 for s in range(6)}
    assert watching.model_digests("outside_optimizer") == dict.fromkeys(range(6), 0)


# --------------------------------------------------------------------- sparse, frozen, evaluation


def test_sparse_gradients(watching):
    torch.manual_seed(0)
    model = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    for step in range(6):
        # The same row several times: their gradients are added up only when it is applied.
        rows = torch.tensor([[step, step, 3], [step + 1, step, 19]])
        loss = functional.mse_loss(model(rows), torch.ones(2, 4))
        optimizer.zero_grad()
        loss.backward()
        assert not model.weight.grad.is_coalesced()
        optimizer.step()
        diary.step(loss)
    diary.check(watching)


def test_evaluation_phases(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    losses, accuracies = {}, {}
    for step in range(8):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        diary.step(loss)
        if step in (2, 5, 7):
            model.eval()
            total, right, count = 0.0, 0, 0
            with torch.no_grad():
                for part, size in enumerate((5, 5, 2)):
                    x, y = batch(1000 + 10 * step + part, size)
                    scores = model(x)
                    total += functional.cross_entropy(scores, y).item() * size
                    right += int((scores.argmax(1) == y).sum())
                    count += size
            model.train()
            losses[step], accuracies[step] = total / count, right / count
    diary.check(watching)
    assert watching.points("eval/loss") == pytest.approx(losses)
    assert watching.points("eval/accuracy") == pytest.approx(accuracies)
