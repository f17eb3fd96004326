"""What must not matter: how steps are cut, the unit of the loss, the numbers of the ranks."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.server.detectors import DETECTORS, build
from rankscope.server.detectors.settings import Overrides, effective
from tests.support.judging import judge, verdict
from tests.support.runs.chain import chain
from tests.support.runs.replicas import apart
from tests.support.runs.scenarios import GENERATORS, TRACES, recorded

# Training that went well, and one training for every sort of fault.
RECORDED = [path.stem for path in sorted(TRACES.glob("*.npz"))]
FAULTY = [name for name in RECORDED if name.startswith("F")]
# What the losses of recorded trainings are, where they need not fall.
PROFILES = {"H18-ring-gan": "adversarial"}
DIVERGENT = ["none", "start", "bitflip", "skipped", "bypassed", "rate", "drift", "step-skipped"]
DIVERGENT += ["none+own", "skipped+own", "none+one"]
# Every link posted, through the aligner.
CHAIN = ["none", "sum", "swapped", "mixed", "lost-rank", "accumulating", "noise-added", "one-clips"]
CHAIN += ["pair-duplicated", "same-order", "restart-replays", "overlap", "frozen", "one-frozen"]
CHAIN += ["one-tensor-frozen", "skips", "one-scale", "nonfinite", "other-commit", "holds-others"]
CHAIN += ["same-rng", "ended-schedule", "skipped-overflow"]

PUSHES = ["pushes none", "pushes stuck", "pushes many-lost", "pushes twice"]

# Times and norms of the ranks alone.
LATE = ["timings none", "timings computes", "timings fetches", "timings reduces"]
LATE += ["norms larger", "norms bursts", "averages once", "memory 2", "memory -1"]
NORMS = {"larger": {"factor": 4, "at": 100}, "bursts": {"factor": 50, "bursts_every": 13}}

SCALED = ("one-scale", "skipped-overflow")

# What users log.
LOGGED = ["shift", "both", "single", "recurring", "level", "spikes", "silent", "back", "smoothed"]
LATE += [f"logged {fault}" for fault in LOGGED]

# Earlier runs of the project.
BESIDE = {
    "as they are": {},
    "worse": {"worse": 0.1, "metric": "grad_norm", "factor": 10.0},
    "slower": {"worse": 0.5, "since": 100, "until": 300, "metric": "step_seconds", "factor": 2},
}
LATE += [f"beside {name}" for name in BESIDE]

slow = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@cache
def scenario(name):
    """A recorded training, or ranks that diverge."""
    if name in RECORDED:
        return recorded(0, trace=name)
    if name.startswith("pushes "):
        return GENERATORS["pushes"](0, fault=name.removeprefix("pushes "))
    if name.startswith("timings "):
        return GENERATORS["timings"](0, fault=name.removeprefix("timings "), hiccups=0.1)
    if name.startswith("logged "):
        return GENERATORS["logged"](0, fault=name.removeprefix("logged "))
    if name.startswith("averages "):
        return GENERATORS["averages"](0, fault=name.removeprefix("averages "))
    if name.startswith("memory "):
        rank = int(name.removeprefix("memory "))
        return GENERATORS["memory"](0, rank=rank, limit=1.2e10, epoch=200, hosts=2)
    if name.startswith("beside "):
        return GENERATORS["beside"](0, **BESIDE[name.removeprefix("beside ")])
    if name.startswith("norms "):
        return GENERATORS["norms"](0, **NORMS[name.removeprefix("norms ")])
    if name.startswith("chain "):
        fault = name.removeprefix("chain ")
        return chain(0, fault=fault, amp=1024.0 if fault in SCALED else 0.0)
    fault, _, buffers = name.partition("+")
    return apart(0, fault=fault, buffers=buffers)


def judged(name, scenario, cuts=()):
    """A run under the profile of its loss."""
    reported = effective([Overrides("the tests", PROFILES.get(name))], DETECTORS)
    return judge(scenario, build(), cuts, settings=reported)


@cache
def whole(name):
    return judged(name, scenario(name))


def verdicts(judgement, *, among=None):
    """What a user would notice of a judgement; ranks by another numbering if asked for."""
    return [verdict(alert, among) for alert in judgement.alerts]


def exact(judgement):
    """Everything, to the last bit; as text, since NaN is not equal to itself."""
    return [repr(alert) for alert in judgement.alerts], judgement.checks


names = st.sampled_from(RECORDED + DIVERGENT + LATE + [f"chain {fault}" for fault in CHAIN])


@given(name=names, cuts=st.lists(st.integers(0, 700), max_size=12))
@slow
def test_cutting_the_steps_into_blocks_changes_nothing(name, cuts):
    assert exact(judged(name, scenario(name), cuts)) == exact(whole(name))


def where_it_matters(alerts, reach=28):
    """Each step of the beginning and around what was found; every eleventh of the others.

    A thousand blocks take seconds, and a block of eleven steps, which no period of sampling or of
    averaging divides, has its borders anywhere. Within reach of a border are the detectors' warm-up
    and the steps that they want in a row.
    """
    found = {step for alert in alerts for step in (alert.first_step, alert.seen_step)}
    dense = {step for at in found | {0} for step in range(at - reach, at + reach)}
    return sorted(step for step in dense | set(range(0, 2000, 11)) if step >= 0)


@pytest.mark.parametrize(
    "name",
    ["F07-bad-batch", "F42-demo-labels", "skipped", *PUSHES, *LATE, *(f"chain {f}" for f in CHAIN)],
)
def test_step_by_step_is_as_good_as_at_once(name):
    cuts = where_it_matters(whole(name).alerts)
    assert exact(judged(name, scenario(name), cuts)) == exact(whole(name))


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("name", FAULTY)
def test_the_unit_of_the_loss_changes_no_verdict(name, factor):
    assert verdicts(judged(name, scenario(name).scaled(factor))) == verdicts(whole(name))


@given(name=names, data=st.data())
@slow
def test_numbering_the_ranks_otherwise_permutes_the_answer(name, data):
    trace = scenario(name)
    order = data.draw(st.permutations(range(trace.ranks)))
    among = dict(enumerate(order))
    assert verdicts(judged(name, trace.permuted(order)), among=among) == verdicts(whole(name))


@pytest.mark.parametrize("name", RECORDED)
def test_logging_every_fifth_step_adds_no_alert(name):
    thin = judged(name, scenario(name).thinned(5))
    known = {alert.kind for alert in whole(name).alerts}
    assert {alert.kind for alert in thin.alerts if alert.severity != "info"} <= known


@pytest.mark.parametrize("name", [name for name in RECORDED if name.startswith("H")])
def test_healthy_training_raises_nothing(name):
    judgement = whole(name)
    assert [alert.title for alert in judgement.alerts] == []
    assert judgement.checks["loss.spike"].status == "ok"
    assert judgement.checks["rank.loss_outlier"].status == "ok"


@pytest.mark.parametrize("name", ["F07-bad-batch", "H01-sgd"])
def test_what_is_not_present_is_not_examined(name):
    """A metric that a rank did not post has 0 in its place, and 0 is a value, too."""
    trace = scenario(name)
    loss = trace.series["loss"].copy()
    present = np.ones(loss.shape, dtype=bool)
    # Beside the steps themselves: what no rank posted at.
    gaps = np.arange(0, loss.shape[1], 7)
    gaps = gaps[(gaps != 300)]
    loss[:, gaps], present[:, gaps] = 0.0, False
    series = {**trace.series, "loss": loss}
    sparse = replace(trace, series=series, present={"loss": present})
    found = judged(name, sparse)
    assert {a.kind for a in found.alerts} == {a.kind for a in whole(name).alerts}


def test_a_window_without_steps_changes_nothing_but_silence():
    for detector in build():
        state = detector.start()
        for window in GENERATORS["silence"](0, others="go-on", at=1e9, seconds=20).windows():
            outcome = detector.advance(window, state)
            assert outcome.findings == ()
            assert set(outcome.checks) == set(detector.kinds)


def test_every_detector_is_among_those_that_are_held_to_this():
    assert {type(detector) for detector in build()} == set(DETECTORS)
