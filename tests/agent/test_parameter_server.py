"""Server and workers report versions: which ones, what they held, and what was pushed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import from_numpy

from rankscope import agent
from rankscope.agent.integrations.parameter_server import order_of
from tests.support.watching import digests_of


def weights(version):
    return {"w": np.full(3, version, np.float32), "b": np.arange(2.0) + version}


def digests(version):
    return digests_of({name: from_numpy(array) for name, array in weights(version).items()})


def server(watching, version=0):
    held = weights(version)
    made = agent.parameter_server.Server(
        held, version=version, rank=0, world_size=3, **watching._options
    )
    watching._dense(made.monitor)

    def applied(worker, on, **more):
        for name, array in weights(made.version + 1).items():
            held[name] = array
        made.applied(worker, on, **more)

    return made, applied


def worker(watching, rank, **options):
    made = agent.parameter_server.Worker(rank=rank, world_size=3, **watching._options, **options)
    watching._dense(made.monitor)
    return made


def test_every_version_is_a_step(watching):
    serving, applied = server(watching)
    applied(2, 0)
    applied(1, 0, gradients={"w": np.full(4, 2.0)})
    applied(1, 2)
    assert serving.version == 3
    assert watching.points("push_worker", rank=0) == {1: 2, 2: 1, 3: 1}
    assert watching.points("push_staleness", rank=0) == {1: 0, 2: 1, 3: 0}
    assert watching.points("grad_norm", rank=0) == {2: 4.0}
    assert watching.digests("parameters", rank=0) == {v: digests(v) for v in range(4)}
    assert watching.batches(rank=0)[-1].through_step == 3


def test_a_worker_reports_the_versions_it_pulled(watching):
    working = worker(watching, 1)
    for version in (0, 4, 5, 11):
        working.step(version, loss=10 + version, parameters=weights(version))
    working.close()
    assert watching.points("loss", rank=1) == {0: 10, 4: 14, 5: 15, 11: 21}
    assert watching.points("pushes", rank=1) == {0: 0, 4: 1, 5: 2, 11: 3}
    assert watching.digests("parameters", rank=1) == {v: digests(v) for v in (0, 4, 5, 11)}
    assert watching.batches(rank=1)[-1].through_step == 11


def test_what_a_worker_pushes_is_its_own(watching):
    working = worker(watching, 1)
    working.step(0, loss=1.0, gradients={"w": np.full(4, 2.0)})
    working.step(2, loss=1.0, local_gradients={"w": np.full(4, 3.0)})
    working.close()
    assert watching.points("grad_norm_local", rank=1) == {0: 4.0, 2: 6.0}
    assert watching.points("grad_norm", rank=1) == {}


def test_a_version_that_is_used_again_is_compared_once(watching):
    working = worker(watching, 1)
    for version in (3, 3, 3, 7):
        working.step(version, loss=1.0, parameters=weights(version))
    assert working.pushes == 4
    # Its own pushes have made further versions by then.
    assert watching.points("loss", rank=1) == dict.fromkeys((3, 4, 5, 7), 1.0)
    assert watching.digests("parameters", rank=1) == {v: digests(v) for v in (3, 7)}
    assert watching.points("pushes", rank=1) == {0: 0, 3: 0, 7: 3}


def test_a_job_that_goes_on(watching):
    (serving, applied), working = server(watching, 100), worker(watching, 2, version=100)
    working.step(103, loss=1.0)
    applied(2, 100)
    assert serving.version == 101
    assert watching.points("pushes", rank=2) == {100: 0, 103: 0}
    assert watching.points("push_staleness", rank=0) == {101: 0}
    assert watching.digests("parameters", rank=0) == {v: digests(v) for v in (100, 101)}


def test_an_error_ends_the_run_as_failed(watching):
    working = worker(watching, 1)
    with pytest.raises(RuntimeError, match="gone"), working:
        raise RuntimeError("the server is gone")
    last = watching.batches(rank=1)[-1]
    assert (last.state, last.error) == ("failed", "RuntimeError: the server is gone")


def test_nothing_is_reported_where_it_is_switched_off():
    with agent.parameter_server.Worker(mode="disabled") as working:
        working.step(3, loss=1.0)
        working.step(3, loss=1.0)
    with agent.parameter_server.Server(weights(0), mode="disabled") as serving:
        serving.applied(1, 0)
    assert (working.pushes, serving.version) == (2, 1)


def intervals_of(workers, version):
    """Version intervals of the pushes of some workers that read and apply in some order."""
    at, begins, intervals, who = {}, {}, [], []
    for worker in workers:
        match at.get(worker, 0):
            case 0:
                begins[worker] = version
            case 1:
                version += 1
            case 2:
                intervals.append((begins[worker], version))
                who.append(worker)
        at[worker] = (at.get(worker, 0) + 1) % 3
    return intervals, who, version


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(0, 10), st.randoms())
def test_pushes_are_put_in_an_order_that_can_have_been(workers, version, random):
    # Every worker ends what it has begun.
    for worker in range(4):
        workers += [worker] * (-workers.count(worker) % 3)
    intervals, who, last = intervals_of(workers, version)
    assert len(intervals) == last - version
    shuffled = random.sample(range(len(intervals)), len(intervals))

    order = [shuffled[place] for place in order_of([intervals[k] for k in shuffled], version)]

    assert sorted(order) == list(range(len(intervals)))
    for made, place in enumerate(order, version + 1):
        before, after = intervals[place]
        assert before < made <= after
    for worker in range(4):
        own = [place for place in order if who[place] == worker]
        assert own == sorted(own)


def test_what_was_not_applied_makes_no_version():
    assert order_of([(1, 3), (0, 0), (0, 1), (1, 2)], 0) == [1, 2, 3, 0]
