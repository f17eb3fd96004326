"""Evaluations of several passes: each number is one that the script could print."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.support.watching import CLASSES, FEATURES, net


def data(seed, size=23):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (size,), generator=generator))


TRAIN, VAL, TEST = data(1), data(2), data(3)


def plain(loss, model):
    return loss


def step(model, optimizer, seed, objective=plain):
    x, y = data(100 + seed, 8).tensors
    optimizer.zero_grad()
    objective(functional.cross_entropy(model(x), y), model).backward()
    optimizer.step()


def whole(model, dataset):
    """Loss and accuracy over a data set."""
    x, y = dataset.tensors
    with torch.no_grad():
        scores = model(x)
        loss = functional.cross_entropy(scores, y).item()
    return loss, (scores.argmax(1) == y).double().mean().item()


@torch.no_grad()
def evaluate(model, loader):
    for x, y in loader:
        functional.cross_entropy(model(x), y)


def parts(dataset):
    x, y = dataset.tensors
    return list(zip(x.split(5), y.split(5), strict=True))


class Job:
    """Two steps, an evaluation, two steps, the same evaluation, a step."""

    def __init__(self, watching, evaluation, objective=plain):
        self.watching = watching
        model = net()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        monitor = watching.attach(model, self.optimizer)
        self.models = []
        for seed in range(5):
            step(model, self.optimizer, seed, objective)
            if seed in (1, 3):
                self.models.append(copy.deepcopy(model).eval())
                model.eval()
                evaluation(monitor, model)
                model.train()

    def expected(self, dataset, which=0):
        return {
            at: pytest.approx(whole(model, dataset)[which])
            for at, model in zip((1, 3), self.models, strict=True)
        }

    def published(self):
        self.watching.close()
        names = {n for b in self.watching.collector.batches for n in b.columns}
        return sorted(n for n in names if n.startswith("eval/") and n.endswith("loss"))

    def notes(self):
        return [text for _, text in self.watching.events("agent.note")]


def test_named_passes(watching):
    def evaluation(monitor, model):
        for name, dataset in (("train", TRAIN), ("val", VAL)):
            with monitor.evaluating(name):
                evaluate(model, parts(dataset))

    job = Job(watching, evaluation)
    assert job.published() == ["eval/train/loss", "eval/val/loss"]
    assert watching.points("eval/val/loss") == job.expected(VAL)
    assert watching.points("eval/train/loss") == job.expected(TRAIN)
    assert watching.points("eval/val/accuracy") == job.expected(VAL, 1)
    assert job.notes() == []


def test_a_named_pass_of_a_model_in_training_mode_and_of_an_average(watching):
    def evaluation(monitor, model):
        model.train()
        with monitor.evaluating("live"):
            evaluate(model, parts(VAL))
        average = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.mul_(0.5)
        with monitor.evaluating("ema"):
            evaluate(average, parts(VAL))

    job = Job(watching, evaluation)
    assert job.published() == ["eval/ema/loss", "eval/live/loss"]
    assert watching.points("eval/live/loss") == job.expected(VAL)
    assert len(watching.points("loss")) == 5


def test_passes_inside_each_other(watching):
    def evaluation(monitor, model):
        with monitor.evaluating("outer"):
            evaluate(model, parts(VAL))
            with monitor.evaluating("inner"):
                evaluate(model, parts(TEST))

    job = Job(watching, evaluation)
    assert watching.points("eval/outer/loss") == job.expected(VAL)
    assert watching.points("eval/inner/loss") == job.expected(TEST)


def test_what_raises_inside_reaches_the_trainer(watching):
    model = net()
    monitor = watching.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def evaluation():
        with monitor.evaluating("val"):
            evaluate(model, parts(VAL))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluation()
    assert watching.points("eval/val/loss") == {0: pytest.approx(whole(net(), VAL)[0])}


@pytest.mark.parametrize("loader", [lambda d: DataLoader(d, 5), parts])
def test_one_pass_needs_no_name(watching, loader):
    job = Job(watching, lambda monitor, model: evaluate(model, loader(VAL)))
    assert job.published() == ["eval/loss"]
    assert watching.points("eval/loss") == job.expected(VAL)
    assert job.notes() == []


@pytest.mark.parametrize("loader", [lambda d: DataLoader(d, 5), parts])
def test_passes_from_two_lines_are_distinguished(watching, loader):
    def evaluation(monitor, model):
        evaluate(model, loader(VAL))
        evaluate(model, loader(TEST))

    job = Job(watching, evaluation)
    assert job.published() == ["eval/1/loss", "eval/2/loss"]
    assert watching.points("eval/1/loss") == job.expected(VAL)
    assert watching.points("eval/2/loss") == job.expected(TEST)
    assert len(job.notes()) == 1
    assert 'monitor.evaluating("val")' in job.notes()[0]


def test_a_loop_over_loaders(watching):
    def evaluation(monitor, model):
        for dataset in (TRAIN, VAL):
            evaluate(model, DataLoader(dataset, 5))

    job = Job(watching, evaluation)
    assert job.published() == ["eval/1/loss", "eval/2/loss"]
    assert watching.points("eval/1/loss") == job.expected(TRAIN)
    assert watching.points("eval/2/loss") == job.expected(VAL)


def test_a_loop_over_data_sets_without_a_loader_is_no_number(watching):
    """As nanoGPT's `estimate_loss`: nothing distinguishes the two."""

    def evaluation(monitor, model):
        for dataset in (TRAIN, VAL):
            losses = []
            for x, y in parts(dataset):
                with torch.no_grad():
                    losses.append(functional.cross_entropy(model(x), y))

    job = Job(watching, evaluation)
    assert job.published() == []
    assert len(job.notes()) == 1
    assert 'monitor.evaluating("val")' in job.notes()[0]


def test_an_evaluation_after_others_goes_on_under_its_name(watching):
    turns = []

    def evaluation(monitor, model):
        turns.append(1)
        evaluate(model, DataLoader(VAL, 5))
        if len(turns) == 2:
            evaluate(model, DataLoader(TEST, 5))

    job = Job(watching, evaluation)
    assert job.published() == ["eval/2/loss", "eval/loss"]
    assert watching.points("eval/loss") == job.expected(VAL)
    assert list(watching.points("eval/2/loss")) == [3]


def test_single_batches_of_a_loader_are_one_pass(watching):
    def evaluation(monitor, model):
        loader = DataLoader(VAL, len(VAL))
        for _ in range(3):
            x, y = next(iter(loader))
            with torch.no_grad():
                functional.cross_entropy(model(x), y)

    job = Job(watching, evaluation)
    assert job.published() == ["eval/loss"]
    assert watching.points("eval/loss") == job.expected(VAL)


def test_the_loops_of_the_training_around_it_do_not_count(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    watching.attach(model, optimizer)
    printed = {}
    for epoch in range(2):
        for turn in range(2):
            step(model, optimizer, turn)
            model.eval()
            total = 0.0
            for x, y in parts(VAL):
                with torch.no_grad():
                    total += functional.cross_entropy(model(x), y).item() * len(y)
            printed[2 * epoch + turn] = pytest.approx(total / len(VAL))
            model.train()
    assert watching.points("eval/loss") == printed


def penalised(loss, model):
    """As a regularisation adds to it, or the divergence of a variational autoencoder."""
    return loss + 0.1 * sum(p.square().sum() for p in model.parameters())


def test_an_evaluation_with_a_loss_of_its_own_means_that_one(watching):
    def evaluation(monitor, model):
        evaluate(model, DataLoader(VAL, batch_size=5))

    job = Job(watching, evaluation, penalised)
    assert watching.points("eval/loss") == job.expected(VAL)
    assert watching.points("eval/accuracy") == job.expected(VAL, 1)
    assert "sum of terms" not in " ".join(job.notes())


@pytest.mark.parametrize("module", [False, True])
def test_a_term_of_what_is_trained_on_has_the_name_of_its_function(watching, module):
    """Where one function makes the loss of both, what it adds is in both."""

    class Criterion(torch.nn.Module):
        def forward(self, scores, y):
            return functional.cross_entropy(scores, y) + 0.1 * scores.square().mean()

    criterion = Criterion() if module else Criterion().forward
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    watching.attach(model, optimizer)
    x, y = VAL.tensors
    expected = {}
    for number in range(2):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            scores = model(x)
            criterion(scores, y)
        model.train()
        # As of another place, and no pass of the model.
        expected[number] = pytest.approx(float(-scores.log_softmax(1)[range(len(y)), y].mean()))
    assert watching.points("eval/cross_entropy/loss") == expected
    assert watching.points("eval/loss") == {}


@pytest.mark.parametrize(
    "objective",
    [
        lambda loss, model: loss * 0.5,
        lambda loss, model: loss.double().mean(),
        lambda loss, model: torch.stack([loss]).mean() / 4,
        lambda loss, model: loss + 1.0,
    ],
    ids=["factor", "cast", "stacked", "constant"],
)
def test_a_loss_that_is_scaled_is_still_the_loss(watching, objective):
    def evaluation(monitor, model):
        evaluate(model, DataLoader(VAL, batch_size=5))

    job = Job(watching, evaluation, objective)
    assert watching.points("eval/loss") == job.expected(VAL)


@pytest.mark.parametrize("where", ["inline", "stored", "criterion", "in place", "helper"])
def test_what_an_evaluation_adds_a_term_to_is_not_its_loss(watching, where):
    """Of a sum that the evaluation makes itself, what one function gives is a term."""
    criterion = torch.nn.CrossEntropyLoss()

    def helper(scores, y):
        return functional.cross_entropy(scores, y)

    def evaluation(monitor, model):
        x, y = VAL.tensors
        with torch.no_grad():
            scores = model(x)
            penalty = scores.square().mean()
            if where == "inline":
                loss = functional.cross_entropy(scores, y) + 0.1 * penalty
            elif where == "stored":
                likelihood = functional.cross_entropy(scores, y)
                loss = likelihood + 0.1 * penalty
            elif where == "criterion":
                loss = 0.1 * penalty + criterion(scores, y)
            elif where == "in place":
                loss = functional.cross_entropy(scores, y)
                loss += 0.1 * penalty
            else:
                loss = helper(scores, y) + 0.1 * penalty
            assert loss.item() > 0

    Job(watching, evaluation, penalised)
    assert watching.points("eval/loss") == {}
    assert len(watching.points("eval/cross_entropy/loss")) == 2


@pytest.mark.parametrize("how", ["item", "tensors", "anew", "list"])
def test_what_an_evaluation_adds_up_over_batches_is_its_loss(watching, how):
    def evaluation(monitor, model):
        total, losses = torch.zeros(()), []
        with torch.no_grad():
            for x, y in DataLoader(VAL, batch_size=len(VAL)):
                if how == "item":
                    total += functional.cross_entropy(model(x), y).item() * len(y)
                elif how == "tensors":
                    loss = functional.cross_entropy(model(x), y)
                    total += loss * len(y)
                elif how == "anew":
                    total = total + len(y) * functional.cross_entropy(model(x), y)
                else:
                    losses.append(functional.cross_entropy(model(x), y))
        assert float(total) >= 0

    job = Job(watching, evaluation, penalised)
    assert watching.points("eval/loss") == job.expected(VAL)
