"""An asynchronous parameter server and its workers, simulated event by event."""

from __future__ import annotations

import heapq

import numpy as np

from tests.support.runs.traces import Trace

# What can be wrong, with the worker that it is wrong with.
FAULTS = ("none", "stuck", "lost", "twice", "slow", "hiccup", "background", "many-lost")


def pushes(
    seed: int,
    *,
    fault: str = "none",
    workers: int = 3,
    versions: int = 240,
    at: int = 120,
    times_slow: int = 1,
) -> Trace:
    """Workers whose gradients take random times (gamma, a mean of 1), and one that is broken.

    Rank 0 is the server. Rank 2 goes wrong at the first version from `at` on that it pulls: it
    pulls no more (`stuck`), or one push, or every third one (`many-lost`), is lost, or applied
    `twice`; or it is ten times as slow (`slow`), for `times_slow` pushes (`hiccup`). With
    `background`, all workers pull before their last push has been applied.
    """
    assert fault in FAULTS
    random = np.random.default_rng(seed)
    names = ("push_worker", "push_staleness", "pushes")
    series = {name: np.zeros((workers + 1, versions)) for name in names}
    present = {name: np.zeros((workers + 1, versions), bool) for name in names}

    def tell(name: str, rank: int, step: int, value: float) -> None:
        if step < versions:
            series[name][rank, step], present[name][rank, step] = value, True

    version, sent, broken = 0, [0] * (workers + 1), 0
    waiting: dict[int, int] = {}
    pulled = dict.fromkeys(range(1, workers + 1), 0)
    due = [(float(random.gamma(8, 1 / 8)), w) for w in pulled]
    heapq.heapify(due)
    for w in pulled:
        tell("pushes", w, 0, 0)
    while version < versions - 1:
        now, w = heapq.heappop(due)
        is_broken = w == 2 and pulled[w] >= at
        times = 1
        if is_broken:
            broken += 1
            if (fault == "lost" and broken == 1) or (fault == "many-lost" and broken % 3 == 1):
                times = 0
            if fault == "twice" and broken == 1:
                times = 2
        sent[w] += 1
        computed_on = pulled[w]
        if fault == "background":
            # The push before this one is applied now; this one waits for the next turn.
            times = 1 if w in waiting else 0
            computed_on, waiting[w] = waiting.get(w, 0), pulled[w]
        for _ in range(times):
            version += 1
            tell("push_worker", 0, version, w)
            tell("push_staleness", 0, version, version - 1 - computed_on)
        if not (fault == "stuck" and is_broken) and version > pulled[w]:
            pulled[w] = version
            tell("pushes", w, version, sent[w])
        slow = is_broken and (fault == "slow" or (fault == "hiccup" and broken <= times_slow))
        heapq.heappush(due, (now + (10.0 if slow else 1.0) * random.gamma(8, 1 / 8), w))
    return Trace(f"pushes {fault}", seed, np.arange(versions), series, present)
