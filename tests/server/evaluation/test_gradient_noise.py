"""The gradient noise scale, out of norms that a run has posted: McCandlish et al. 2018, A.1."""

import base64
import math

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.dashboard.figures import gradient_noise
from rankscope.server.app import create_app
from rankscope.server.detectors.mechanisms.noise_scale import estimates, moving
from rankscope.server.settings import Settings
from tests.support.servers.api import batch, column, get, post
from tests.support.servers.serve_app import serve_app

RANKS, PART, DIMENSIONS, STEPS = 4, 8, 200, 400
# Of each of the dimensions: tr(Sigma) and |G|^2, and so the noise scale, follow.
SPREAD, SIGNAL = 1.5, 0.4
SCALE = SPREAD**2 / SIGNAL**2


def norms(steps=STEPS, ranks=RANKS, seed=0):
    """Norms [steps, ranks] of the ranks' gradients, and [steps] of their mean."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, SPREAD / math.sqrt(PART), (steps, ranks, DIMENSIONS))
    own = SIGNAL + noise
    return np.linalg.norm(own, axis=2), np.linalg.norm(own.mean(axis=1), axis=1)


def test_the_estimates_are_right_on_average():
    own, reduced = norms(2000)
    signal, noise = estimates((own**2).mean(axis=1), reduced**2, ranks=RANKS, part=float(PART))
    assert signal.mean() == pytest.approx(DIMENSIONS * SIGNAL**2, rel=0.02)
    assert noise.mean() == pytest.approx(DIMENSIONS * SPREAD**2, rel=0.02)


def test_there_is_no_curve_of_few_steps_or_of_what_is_no_mean():
    own, reduced = norms()
    small, big, part = (own**2).mean(axis=1), reduced**2, np.full(STEPS, float(PART))
    steps = np.arange(STEPS)
    few = slice(0, 49)
    assert moving(steps[few], small[few], big[few], part[few], ranks=RANKS, counted=True) is None
    summed = moving(steps, small, big * RANKS**2, part, ranks=RANKS, counted=True)
    assert np.isnan(summed.scale).all()


@pytest.fixture
def client(tmp_path):
    with serve_app(create_app(Settings(database=f"sqlite:///{tmp_path / 'x.db'}"))) as made:
        yield made


def send(client, *, ranks=RANKS, of=None, every=1, **changed):
    """Posts the norms of a run; `changed` has series that replace these, [steps] or [steps, R]."""
    own, reduced = norms(ranks=ranks)
    series = {
        "grad_norm_local": own,
        "grad_norm": reduced,
        "samples": np.full(STEPS, float(PART)),
        "loss": np.linspace(2, 1, STEPS),
    } | changed
    for rank in range(ranks if of is None else of):
        columns = {
            name: column(
                range(0, STEPS, every if name == "grad_norm_local" else 1),
                (values if np.ndim(values) == 1 else values[:, rank])[
                    :: every if name == "grad_norm_local" else 1
                ],
            )
            for name, values in series.items()
            if values is not None
        }
        sent = batch(
            rank,
            world_size=ranks,
            state="finished",
            through_step=STEPS - 1,
            hello=wire.Hello(started_at=1000.0),
            columns=columns,
        )
        assert post(client, sent).status_code == 200
    assert get(client, "/runs/otter")["last_step"] == STEPS - 1
    answer = client.get("/runs/otter/figures/noise.json")
    assert answer.status_code == 200
    return answer.json()


def lines(figure):
    def array(of):
        return np.frombuffer(base64.b64decode(of["bdata"]), of["dtype"])

    return {t["name"]: (array(t["x"]), array(t["y"])) for t in figure["data"]}


def test_the_curve_of_a_run(client):
    figure = send(client)
    drawn = lines(figure)
    steps, scale = drawn["noise scale"]
    assert (steps[0], steps[-1]) == (49, STEPS - 1)
    # Moving means of 50 steps: each is within a third or so, and all of them together near it.
    assert np.median(scale) == pytest.approx(SCALE, rel=0.15)
    assert set(drawn["batch"][1].tolist()) == {float(RANKS * PART)}
    assert figure["layout"]["yaxis"]["title"]["text"] == "samples"
    assert figure["layout"]["meta"]["summary"].startswith("Noise scale ")


@pytest.mark.parametrize(
    "changed",
    [
        # Clipped to 1, and posted so, with what it was before, or by how much.
        {"grad_norm": np.ones(STEPS), "grad_norm_preclip": norms()[1]},
        {"grad_norm": np.ones(STEPS), "clip_coefficient": 1 / norms()[1]},
        # Scaled for half precision before the reduction.
        {"grad_norm_local": 1024 * norms()[0], "amp_scale": np.full(STEPS, 1024.0)},
    ],
)
def test_clipping_and_scaling_are_taken_back(client, changed):
    _, scale = lines(send(client, **changed))["noise scale"]
    assert np.median(scale) == pytest.approx(SCALE, rel=0.15)


def test_norms_that_are_read_at_sampled_steps_only(client):
    steps, scale = lines(send(client, every=4))["noise scale"]
    assert (steps[0], set(np.diff(steps).tolist())) == (49 * 4, {4})
    assert np.median(scale) == pytest.approx(SCALE, rel=0.3)


def test_of_many_ranks_some_stand_for_all(client):
    _, scale = lines(send(client, ranks=40))["noise scale"]
    assert np.median(scale) == pytest.approx(SCALE, rel=0.15)


def test_without_samples_the_batch_of_a_rank_is_the_unit(client):
    figure = send(client, samples=None)
    _, scale = lines(figure)["noise scale"]
    assert np.median(scale) == pytest.approx(SCALE / PART, rel=0.15)
    assert figure["layout"]["yaxis"]["title"]["text"] == "batches of a rank"


@pytest.mark.parametrize(
    "changed",
    [
        {"grad_norm_local": None},
        {"grad_norm": None},
        # Each rank has a gradient of its own after the reduction, too: there is no mean of them.
        {"grad_norm": norms()[0]},
        {"ranks": 1, "grad_norm": norms(ranks=1)[0][:, 0]},
        # A rank has not reported.
        {"of": RANKS - 1},
    ],
)
def test_where_it_cannot_be_computed_nothing_is_said(client, changed):
    assert send(client, **changed)["layout"]["meta"] == {"nothing": True}


def test_a_long_curve_is_thinned_and_keeps_its_end():
    steps = np.arange(10_000)
    scale = np.where(steps < 5000, np.inf, 64.0)
    figure = gradient_noise(steps, scale, np.full(10_000, 32.0), counted=True)
    x, y = figure.data[0].x, figure.data[0].y
    assert len(x) <= 600
    assert x[-1] == 9999
    assert np.isnan(y[0])
    said = figure.layout.meta["summary"]
    assert said == (
        "Noise scale 64 samples at step 9,999, batch 32: a step is mostly noise, and 2 times the "
        "batch would be half signal"
    )
