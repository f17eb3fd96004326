"""`agent.start`: what a trainer of any framework reports, step by step, in arrays."""

import math

import numpy as np
import pytest
import torch

from rankscope import agent
from tests.support.watching import digests_of

STEPS = 6


class Regression:
    """Least squares by hand, in numpy."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.parameters = {
            "layer": {"weight": self.random.normal(size=(4, 3)), "bias": np.zeros(3)},
            "scales": [np.ones(2, np.float32), np.float32(0.5)],
        }

    def step(self):
        x = self.random.normal(size=(8, 4))
        layer = self.parameters["layer"]
        wrong = x @ layer["weight"] + layer["bias"] - x[:, :3]
        gradients = {"layer": {"weight": x.T @ wrong / 8, "bias": wrong.mean(0)}}
        for name, gradient in gradients["layer"].items():
            layer[name] = layer[name] - 0.1 * gradient
        return float(np.square(wrong).mean()), gradients


def norm(gradients):
    return math.sqrt(sum(float(np.square(g).sum()) for g in gradients["layer"].values()))


def digests(parameters):
    flat = {
        "layer.weight": parameters["layer"]["weight"],
        "layer.bias": parameters["layer"]["bias"],
        "scales.0": parameters["scales"][0],
        "scales.1": np.asarray(parameters["scales"][1]),
    }
    return digests_of({name: torch.from_numpy(array.copy()) for name, array in flat.items()})


@pytest.mark.parametrize("way", ["arrays", "callables", "read-only", "torch"])
def test_what_is_reported_arrives(watching, way):
    def in_form(tree):
        if isinstance(tree, dict):
            return {key: in_form(value) for key, value in tree.items()}
        if isinstance(tree, list):
            return [in_form(value) for value in tree]
        if way == "torch":
            return torch.from_numpy(np.array(tree))
        if way == "read-only":
            tree = np.asarray(tree)
            tree.flags.writeable = False
        return tree

    def given(tree):
        return (lambda: in_form(tree)) if way == "callables" else in_form(tree)

    model = Regression()
    before = digests(model.parameters)
    monitor = watching.start(parameters=given(model.parameters), config={"depth": 1})
    losses, norms, held = [], [], []
    for step in range(STEPS):
        loss, gradients = model.step()
        monitor.log(during=step)
        monitor.step(
            loss=np.float64(loss) if step % 2 else loss,
            accuracy=0.25,
            parameters=given(model.parameters),
            gradients=given(gradients),
            local_gradients=given({"layer": {"weight": gradients["layer"]["weight"] * 2}}),
            tokens=10 * step,
        )
        losses.append(loss)
        norms.append((norm(gradients), 2 * np.linalg.norm(gradients["layer"]["weight"])))
        held.append(digests(model.parameters))
    assert watching.points("loss") == dict(enumerate(losses))
    assert watching.points("accuracy") == dict.fromkeys(range(STEPS), 0.25)
    assert watching.points("tokens") == {s: 10.0 * s for s in range(STEPS)}
    assert watching.points("during") == {s: float(s) for s in range(STEPS)}
    assert watching.points("grad_norm") == pytest.approx({s: n for s, (n, _) in enumerate(norms)})
    assert watching.points("grad_norm_local") == pytest.approx(
        {s: n for s, (_, n) in enumerate(norms)}
    )
    assert watching.digests("start") == {0: before}
    assert watching.digests("parameters") == dict(enumerate(held))
    assert len(set(watching.model_digests("parameters").values())) == STEPS
    assert set(watching.digests("reduced_gradient")) == set(range(STEPS))
    assert watching.tables()["parameters"].names == tuple(before)
    last = watching.batches()[-1]
    assert (last.state, last.through_step) == ("finished", STEPS - 1)
    [hello] = [b.hello for b in watching.batches() if b.hello is not None][-1:]
    assert hello.config["depth"] == 1


def test_how_far_a_step_moves_the_parameters(watching):
    random = np.random.default_rng(0)
    held = {"a": random.normal(size=(300, 40)), "b": random.normal(size=500)}
    monitor = watching.start(parameters=held)
    ratios = {}
    for step in range(STEPS):
        moves = {n: 10.0**-step * random.normal(size=a.shape) for n, a in held.items()}
        held = {name: array + moves[name] for name, array in held.items()}
        ratios[step] = _norm(moves) / _norm(held)
        monitor.step(parameters=held)
    monitor.step(parameters=held)
    found = watching.points("update_ratio")
    assert found.pop(STEPS) == 0.0
    assert found == pytest.approx(ratios, rel=0.3)


def test_steps_that_were_not_sampled_have_no_update(watching):
    monitor = watching.start()
    monitor._schedule.plan = lambda step: (True, *(step in (0, 2, 3) for _ in range(4)))
    for step in range(5):
        monitor.step(parameters={"w": np.full(4, 1.0 + step)})
    assert list(watching.points("update_ratio")) == [3]


def _norm(arrays):
    return math.sqrt(sum(float(np.square(array).sum()) for array in arrays.values()))


def test_functions_are_called_at_sampled_steps_alone(watching):
    monitor = watching.start()
    # Loss and step time always, gradients at every second step, parameters at every fourth.
    monitor._schedule.plan = lambda step: (True, *(step % n == 0 for n in (2, 4, 4, 4)))
    asked = {"parameters": [], "gradients": []}

    def arrays(kind, step):
        asked[kind].append(step)
        return {"w": np.full(2, step, np.float64)}

    for step in range(8):
        monitor.step(
            loss=0.0,
            parameters=lambda step=step: arrays("parameters", step),
            gradients=lambda step=step: arrays("gradients", step),
        )
    assert asked == {"parameters": [0, 4], "gradients": [0, 2, 4, 6]}
    assert watching.points("grad_norm") == pytest.approx({s: s * 2**0.5 for s in (0, 2, 4, 6)})
    assert list(watching.digests("parameters")) == [0, 4]


def test_several_ranks_of_one_process(watching):
    models = [Regression(seed) for seed in range(3)]
    monitors = [watching.start(rank=rank, world_size=3) for rank in range(3)]
    assert [(m.run, m.rank) for m in monitors] == [("run", 0), ("run", 1), ("run", 2)]
    losses = {rank: [] for rank in range(3)}
    for _ in range(STEPS):
        for rank, (model, monitor) in enumerate(zip(models, monitors, strict=True)):
            loss, gradients = model.step()
            monitor.step(loss=loss, parameters=model.parameters, gradients=gradients)
            losses[rank].append(loss)
    assert watching.runs() == ["run"]
    for rank, model in enumerate(models):
        assert watching.points("loss", rank=rank) == dict(enumerate(losses[rank]))
        assert watching.digests("parameters", rank=rank)[STEPS - 1] == digests(model.parameters)
        assert {b.world_size for b in watching.batches(rank=rank)} == {3}
        assert watching.batches(rank=rank)[-1].state == "finished"


def test_replicas_are_declared(watching):
    monitor = watching.start(parameters={"w": np.ones(3)})
    monitor.replicas("stage 1")
    monitor.step(loss=0.0, parameters={"w": np.ones(3)})
    assert watching.tables()["parameters"].shards == ("stage 1",)
    assert list(watching.tables()) == ["parameters"]
    assert list(watching.digests("parameters")) == [0]


def test_copies_of_a_rank_s_own_are_declared(watching):
    monitors = [watching.start(rank=rank, world_size=2) for rank in range(2)]
    arrays = {"table": np.ones(3), "body": np.ones(2)}
    for monitor in monitors:
        monitor.replicas(None, "table")
        monitor.step(loss=0.0, parameters=arrays, gradients=arrays)
    for rank in range(2):
        for name in ("parameters", "gradients"):
            assert watching.tables(rank=rank)[name].shards == (f"own@{rank}", "")


def test_local_gradients_of_some_of_the_arrays(watching):
    monitor = watching.start()
    arrays = {"a": np.ones(3), "b": np.ones(2)}
    for _ in range(4):
        monitor.step(loss=0.0, gradients=arrays, local_gradients={"a": arrays["a"]})
    assert list(watching.tables()) == ["gradients", "gradients@1"]
    assert all(list(d) == ["a"] for d in watching.digests("local_gradient").values())
    assert all(list(d) == ["a", "b"] for d in watching.digests("reduced_gradient").values())


def test_it_goes_on_at_a_step(watching):
    monitor = watching.start(step=100)
    for _ in range(2):
        monitor.step(loss=1.0)
    monitor.mark("phase two")
    assert watching.points("loss") == {100: 1.0, 101: 1.0}
    assert watching.events("mark") == [(102, "phase two")]


def test_the_plan_is_reported_at_the_end_where_there_is_one(watching):
    trained, idle = watching.start(run="trained"), watching.start(run="idle")
    for _ in range(20):
        trained.step(loss=1.0)
    idle.go_to(100)
    trained.close()
    idle.close()
    assert list(watching.points("rankscope/overhead", run="trained")) == [19]
    assert watching.points("rankscope/overhead", run="idle") == {}


def test_what_a_framework_does_not_give_is_not_posted(watching):
    monitor = watching.start()
    for step in range(4):
        monitor.step(loss=float(step) if step % 2 else None)
    assert watching.points("loss") == {1: 1.0, 3: 3.0}
    assert watching.points("grad_norm") == {}
    assert watching.model_digests("parameters") == {}
    assert watching.batches()[-1].through_step == 3


def test_nan_is_reported_as_nan(watching):
    monitor = watching.start()
    monitor.step(loss=math.nan, gradients={"w": np.array([1.0, math.inf])})
    assert math.isnan(watching.points("loss")[0])
    assert watching.points("grad_norm") == {0: math.inf}


def test_arrays_that_change_their_shape(watching):
    monitor = watching.start()
    for step in range(4):
        monitor.step(loss=0.0, parameters={"w": np.full(3 if step < 2 else 5, step, np.float32)})
    held = watching.digests("parameters")
    expected = [torch.full((3 if step < 2 else 5,), float(step)) for step in range(4)]
    assert held == {s: digests_of({"w": tensor}) for s, tensor in enumerate(expected)}
    assert [t.shapes for t in watching.tables().values()] == [((3,),), ((5,),)]


@pytest.mark.contained
def test_what_is_no_array_harms_nothing(watching):
    monitor = watching.start()
    for step in range(3):
        monitor.step(loss=float(step), parameters={"w": "no numbers"}, gradients={3.5: np.ones(1)})
    assert watching.points("loss") == {0: 0.0, 1: 1.0, 2: 2.0}
    assert len(watching.events("agent.fault")) == 2


def test_bfloat16_of_another_framework(watching):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.arange(8, dtype=np.float32)
    monitor = watching.start()
    monitor.step(loss=0.0, parameters={"w": values.astype(ml_dtypes.bfloat16)})
    expected = torch.from_numpy(values).bfloat16()
    assert watching.digests("parameters") == {0: digests_of({"w": expected})}
    assert watching.tables()["parameters"].dtypes == ("bfloat16",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": -1}, "step"),
        ({"rank": 1}, "both or neither"),
        ({"rank": 2, "world_size": 2}, "no such rank"),
    ],
)
def test_what_cannot_work_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        agent.start(**options)


def test_disabled_takes_everything():
    monitor = agent.start(mode="disabled")
    monitor.step(loss=1.0, parameters={"w": np.ones(3)})
    monitor.log(x=1)
    monitor.mark("y")
    monitor.close()
    assert monitor.closed
