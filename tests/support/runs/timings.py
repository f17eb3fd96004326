"""Runs of which it matters what each rank's time goes into, and how large its gradients are."""

import numpy as np

from rankscope.server.window import Occurrence, Reduction
from tests.support.runs.traces import Trace


def timings(
    seed: int,
    *,
    fault: str = "none",
    ranks: int = 4,
    rank: int = 1,
    at: int = 60,
    until: int = 10_000,
    period: int = 1,
    steps: int = 200,
    compute: float = 0.02,
    slower: float = 0.05,
    noise: float = 0.1,
    every: int = 1,
    hiccups: float = 0.0,
    slower_rank: int = -1,
    queued: bool = False,
    ran: float = 0.0,
    everyone: bool = False,
    lost: float = -1.0,
    busy: bool = False,
    hosts: int = 1,
    inside: bool = False,
    batch: int = 0,
    grows: int = 1,
    unfrozen: bool = False,
    creeps: bool = False,
) -> Trace:
    """Synchronous steps: each rank fetches, computes, and waits for the last one; then all reduce.

    Args:
        fault: `none`; from `at` on `computes` or `fetches` by this much slower; `reduces`,
            `all-compute`, `all-fetch`: all do; with `period` at one step in this number.
        compute: seconds that a healthy rank computes; fetching and reducing take a tenth of it.
        noise: standard deviation of the logarithm of every time.
        every: waits are reported at one step in this number, and at the first 8.
        hiccups: probability that a rank loses its core for 30 ms in a step.
        slower_rank: a second rank with the same fault.
        queued: what the suspect rank takes longer, it waits for a processor; `lost`: so much of it.
        everyone: so do the others.
        ran: for so long it has one at each of these steps; 0: it is not known.
        busy: the others wait for theirs meanwhile, and not for it.
        hosts: machines that the ranks are on, in their order.
        batch: samples that a step is given; `grows`: as many times as many from `at` on.
        unfrozen: more tensors are reduced from `at` on.
        creeps: of `all-compute`, it comes to that in the course of the run, and not at one step.
        inside: rank 0 waits for the others in its forward pass already, which is not seen as such.
    """
    random = np.random.default_rng(seed)
    shape = ranks, steps

    def times(seconds: float) -> np.ndarray:
        return seconds * np.exp(noise * random.standard_normal(shape))

    fetch, own = times(compute / 10), times(compute)
    own += 0.03 * (random.random(shape) < hiccups)
    reduce = times(compute / 10)[:1].repeat(ranks, axis=0)
    reduce += 0.03 * (random.random((1, steps)) < hiccups)
    suspects = [rank] if slower_rank < 0 else [rank, slower_rank]
    span = slice(at, until, period)
    if fault == "computes":
        own[suspects, span] += slower
    elif fault == "fetches":
        fetch[suspects, span] += slower
    elif fault == "all-compute":
        own[:, span] += (slower * np.linspace(0, 1, steps) if creeps else np.full(steps, slower))[
            span
        ]
    elif fault == "all-fetch":
        fetch[:, span] += slower
    elif fault == "reduces":
        reduce[:, span] += slower
    arrival = fetch + own
    wait = arrival.max(axis=0) - arrival + reduce
    known = wait.copy()
    if inside:
        known[0] = reduce[0]
    sampled = np.zeros(shape, dtype=bool)
    sampled[:, :8] = sampled[:, ::every] = True
    waited = np.zeros(shape)
    if queued:
        whose = slice(None) if everyone or fault.startswith("all-") else suspects
        waited[whose, span] = slower if lost < 0 else lost
    if busy:
        others = [r for r in range(ranks) if r not in suspects]
        waited[others] = wait[others]
    sizes = np.full(shape, float(batch))
    sizes[:, span] *= grows
    return Trace(
        f"timings-{fault}",
        seed,
        np.arange(steps),
        {
            **({"samples": sizes} if batch else {}),
            "loss": times(1.0),
            "step_seconds": arrival + wait,
            "data_seconds": fetch,
            "compute_seconds": own + wait,
            "wait_seconds": np.where(sampled, known, 0.0),
            "queued_seconds": waited,
            "processor_seconds": np.full(shape, ran) if ran else arrival + wait - waited,
        },
        present={
            "wait_seconds": sampled,
            "queued_seconds": waited > 0,
            "processor_seconds": (waited > 0) & (busy or ran > 0),
        },
        reductions=tuple(_reduction(step, ranks, 6 if step >= at else 2) for step in range(steps))
        if unfrozen
        else (),
        hosts=tuple(f"node{r * hosts // ranks}" for r in range(ranks)),
    )


def _reduction(step: int, ranks: int, tensors: int) -> Reduction:
    """One that gave the mean."""
    return Reduction(
        step=step, ranks=np.arange(ranks), tensor_count=tensors, known=tensors, ratio=1.0
    )


def norms(
    seed: int,
    *,
    ranks: int = 4,
    steps: int = 200,
    rank: int = 1,
    at: int = 0,
    factor: float = 1.0,
    bursts_every: int = 0,
    scales: tuple[float, ...] = (),
    sigma: float = 0.2,
    tail: float = 0.0,
    decay: float = 0.0,
) -> Trace:
    """Norms of local gradients, with noise of each batch's own.

    Args:
        factor: of one rank's gradients, from `at` on; at an interval of steps if `bursts_every`.
        scales: what the ranks' data do to their norms.
        sigma: standard deviation of the logarithm.
        tail: probability that a batch has a norm ten times as large, whatever its rank.
        decay: of the logarithm, a step.
    """
    random = np.random.default_rng(seed)
    logs = sigma * random.standard_normal((ranks, steps)) - decay * np.arange(steps)
    logs += np.log(10) * (random.random((ranks, steps)) < tail)
    if scales:
        logs += np.log(scales)[:, None]
    touched = np.arange(steps) >= at
    if bursts_every:
        touched &= np.arange(steps) % bursts_every == 0
    logs[rank, touched] += np.log(factor)
    return Trace("norms", seed, np.arange(steps), {"grad_norm_local": np.exp(logs)})


def averages(
    seed: int,
    *,
    fault: str = "none",
    ranks: int = 4,
    rank: int = 1,
    every: int = 8,
    at: int = 24,
    steps: int = 80,
) -> Trace:
    """Ranks that say when they write their parameters, and nothing else.

    Args:
        fault: `once`: one rank writes nothing before step `at`; `from-then-on`: it never does
            again; `pairs`: two halves average in turns; `alone`: one rank writes now and then.
    """
    random = np.random.default_rng(seed)
    wrote = np.zeros((ranks, steps), dtype=bool)
    if fault != "alone":
        wrote[:, every::every] = True
    if fault == "once":
        wrote[rank, at] = False
    elif fault == "from-then-on":
        wrote[rank, at:] = False
    elif fault == "pairs":
        wrote[: ranks // 2, every :: 2 * every] = False
        wrote[ranks // 2 :, 2 * every :: 2 * every] = False
    elif fault == "alone":
        wrote[rank, every::every] = True
    return Trace(
        f"averages-{fault}",
        seed,
        np.arange(steps),
        {"loss": random.random((ranks, steps)), "parameters_written": wrote.astype(float)},
        present={"parameters_written": wrote},
    )


def evaluated_nonfinite(
    seed: int,
    *,
    metric: str = "eval/loss",
    value: float = float("nan"),
    ranks: int = 2,
    rank: int = 1,
    at: int = 40,
    until: int = 10_000,
    every: int = 20,
    steps: int = 120,
) -> Trace:
    """A number that is posted at an interval of steps, and not what it should be on one rank.

    Args:
        value: from `at` up to `until`; 0 or what is random elsewhere.
    """
    random = np.random.default_rng(seed)
    values = random.random((ranks, steps)) if metric != "buffers_nonfinite" else 0.0
    values = values + np.zeros((ranks, steps))
    values[rank, at:until] = value
    posted = np.tile(np.arange(steps) % every == 0, (ranks, 1))
    return Trace(metric, seed, np.arange(steps), {metric: values}, present={metric: posted})


def left_plateau(
    seed: int,
    *,
    after: str = "falls",
    at: int = 150,
    steps: int = 400,
    noise: float = 0.02,
    factor: float = 20.0,
    clip: float = 0.0,
) -> Trace:
    """A loss that stands still, and gradients that are many times as large from some step on.

    Args:
        after: what the loss does then: `falls` from 2.3 to nearly 0, `rises`, `stays`, or
            `unknown`: no loss is posted.
        noise: standard deviation of the loss of a batch.
        factor: what the norm is multiplied by, within five steps.
        clip: the norm that gradients are clipped to; 0 for none.
    """
    random = np.random.default_rng(seed)
    since = np.clip(np.arange(steps) - at, 0, None)
    course = {"falls": np.exp(-since / 40), "rises": 1 + since / 40}.get(after, np.ones(steps))
    losses = 2.3 * course + noise * random.standard_normal((1, steps))
    grown = 1 + (factor - 1) * np.clip(since / 5, 0, 1)
    norms = 0.05 * grown * np.exp(0.2 * random.standard_normal((1, steps)))
    series = {"loss": losses, "grad_norm": norms}
    if after == "unknown":
        del series["loss"]
    if clip:
        series |= {"grad_norm_preclip": norms, "grad_norm": np.minimum(norms, clip)}
    return Trace(f"plateau-{after}", seed, np.arange(steps), series)


def settled(seed: int, *, norm: float = 1e-5, ratio: float = 0.2, at: int = 100) -> Trace:
    """Updates that are larger beside their parameters from some step on, and their gradients."""
    random = np.random.default_rng(seed)
    late = np.arange(220) >= at
    spread = np.exp(0.1 * random.standard_normal((1, 220)))
    series = {
        "update_ratio": np.where(late, ratio, 1e-3) * spread,
        "grad_norm": np.where(late, norm, 1.0) * spread,
        "lr": np.full((1, 220), 0.1),
    }
    return Trace("settled", seed, np.arange(220), series)


def played(seed: int, *, turns: bool = True, rises_to: float = 4.0, steps: int = 400) -> Trace:
    """A loss that falls from 1 to 0.5 and then rises: that of one of two players, or of nobody."""
    random = np.random.default_rng(seed)
    falls = 1 - 0.5 * np.arange(steps // 2) / (steps // 2)
    rises = np.linspace(0.5, rises_to, steps - steps // 2)
    losses = np.concatenate([falls, rises]) * np.exp(0.02 * random.standard_normal(steps))
    events = (Occurrence(0, 4, "optimizers.turns", "", {}),) if turns else ()
    return Trace("played", seed, np.arange(steps), {"loss": losses[None]}, events=events)
