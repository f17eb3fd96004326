"""A small data-parallel training of which every link is posted, through the server's own aligner.

Every fault is done to the arrays themselves; what is posted is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.runs.chain_configs import configs_of
from tests.support.runs.hooks import hook_of
from tests.support.runs.modes import tell_mode
from tests.support.runs.posted import (
    NAMES,
    SHAPES,
    Posted,
    Said,
    Tensors,
    model_word,
    table_of,
    word,
)
from tests.support.runs.samples import read
from tests.support.runs.samples import words as words_of_samples


def chain(
    seed: int,
    *,
    fault: str = "none",
    ranks: int = 4,
    rank: int = 2,
    at: int = 24,
    steps: int = 80,
    every: int = 4,
    dense: int = 10,
    epoch: int = 20,
    clip: float = 0.0,
    amp: float = 0.0,
    tensor: str = "first.weight",
    groups: int = 1,
    dealt: bool = False,
    whole: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    thin: int = 1,
    lost_looks: Sequence[int] = (),
    reads: str = "",
    batch: int = 16,
    hook: str = "",
    size: float = 1.0,
    wrapped: bool = True,
) -> Posted:
    """A training of `ranks` ranks in which something goes wrong from step `at` on.

    Args:
        every: steps from one full sample to the next after the first `dense`.
        epoch: batches of each rank until all have been seen.
        clip: largest norm of the gradient; 0 for no clipping.
        amp: loss scale; 0 for none.
        groups: this number of ranks share a batch and a part of every tensor, as in tensor
            parallelism.
        whole: tensors that all ranks hold whole, whatever `groups` says.
        dealt: every rank holds a part of every tensor and reads its own batches, as under FSDP.
        without: scalars, digests and stages that are not posted.
        thin: after the first `dense` steps, batches are posted at one step in this number,
        lost_looks: but not at these.
        reads: the way in which samples are dealt (`support.samples`); empty: none are reported.
        batch: samples in a batch.
        hook: communication hook of torch that reduces the gradients.
        size: what the loss, and so every gradient, is multiplied by.
        wrapped: whether a wrapper reduces the gradients, and not the loop itself.

    Faults that begin with `alone` reduce nothing from the first step on: in `alone-averaged` the
    parameters are averaged every `at` steps, in `alone-shared` two ranks have one gradient at step
    `at`, and in `alone-wrapped` there is a wrapper that the forward pass goes around. In
    `gathered-late`, which is none, each rank updates tensors of its own, and all get them before
    the next forward pass; in `owners-reduced` the gradients are reduced to these ranks alone.
    """
    random = np.random.default_rng(seed)
    reducer = hook_of(hook)
    target = NAMES.index(tensor)
    start = [random.standard_normal(s).astype(np.float32) for s in SHAPES]
    held = [[t.copy() for t in start] for _ in range(ranks)]
    velocity = [[np.zeros_like(t) for t in start] for _ in range(ranks)]
    averages = [[t.copy() for t in start] for _ in range(ranks)]
    executed, skipped = [0] * ranks, [0] * ranks
    scale = amp
    previous: Tensors | None = None
    before: Tensors | None = None
    run: list[list[Said]] = []
    orders: dict[int, np.ndarray] = {}
    for step in range(steps):
        hit = step >= at
        full = step < dense or step % every == 0
        turn, place = divmod(step, epoch)
        if turn not in orders:
            orders[turn] = (
                np.random.default_rng((seed, 0 if fault == "same-order" else turn))
                .permutation(epoch * ranks)
                .reshape(epoch, ranks)
            )
        ids = [int(orders[turn][place, r]) for r in range(ranks)]
        if fault == "restart-replays" and hit:
            again = step - at
            ids = [int(orders[again // epoch][again % epoch, r]) for r in range(ranks)]
        if fault == "duplicated" and hit:
            ids = [ids[0]] * ranks
        if fault == "pair-duplicated" and hit:
            ids[rank] = ids[(rank + 1) % ranks]
        if fault == "once-duplicated" and step == at:
            ids[rank] = ids[(rank + 1) % ranks]
        if fault == "synthetic":
            ids = [0] * ranks
        if fault == "own-constant":
            ids = list(range(ranks))
        if fault == "overlap" and hit:
            # Every rank shuffles for itself.
            ids = [
                int(np.random.default_rng((seed, turn, r)).permutation(epoch * ranks)[place])
                for r in range(ranks)
            ]
        ids = [ids[r - r % groups] for r in range(ranks)]
        if (fault == "batch-apart" and hit) or fault == "alone-own-batches":
            ids[rank] = 10**6 + step
        written = [0] * ranks
        if fault in ("written", "unwritten"):
            # One rank writes alone, once; or all of them do always, and once one does not.
            for r in range(ranks):
                if (r == rank and step == at) != (fault == "unwritten"):
                    changed = [t * np.float32(0.99) for t in held[r]]
                    written[r] = (model_word(changed) - model_word(held[r])) % 2**64
                    held[r] = changed
        if fault in ("gathered-late", "owners-reduced") and step:
            gathered = [held[i % ranks][i] for i in range(len(NAMES))]
            for r in range(ranks):
                written[r] = (model_word(gathered) - model_word(held[r])) % 2**64
                held[r] = [t.copy() for t in gathered]
        if fault == "alone-averaged" and step and step % at == 0:
            mean = [np.mean(tensors, axis=0) for tensors in zip(*held, strict=True)]
            for r in range(ranks):
                written[r] = (model_word(mean) - model_word(held[r])) % 2**64
                held[r] = [t.copy() for t in mean]
        local = []
        for r in range(ranks):
            noise = np.random.default_rng((seed, ids[r], r if fault == "synthetic" else 0))
            local.append(
                [
                    (size * (0.05 * t + noise.standard_normal(t.shape))).astype(np.float32)
                    for t in held[r]
                ]
            )
        if fault == "bad-shard" and hit:
            local[rank] = [8 * g for g in local[rank]]
        if fault == "nonfinite" and step == at:
            local[rank][target].ravel()[3] = np.nan
        entering = [[g.copy() for g in tensors] for tensors in local]
        if fault == "lost-rank" and hit:
            entering[rank] = [np.zeros_like(g) for g in entering[rank]]
        if fault == "lost-rank-tensor" and hit:
            entering[rank][target] = np.zeros_like(entering[rank][target])
        if fault == "weighted":
            for r in range(ranks):
                share = np.float32(2 * (r + 1) / (ranks + 1))
                entering[r] = [g * share for g in entering[r]]
        reduced = reducer.reduced(entering)
        factor = np.float32(
            {"sum": ranks, "twice": 1 / ranks, "by-hand": 0.37 + 0.1 * np.sin(step)}.get(fault, 1)
            if hit or fault == "by-hand"
            else 1
        )
        reduced = [g * factor for g in reduced]
        mean = [g.copy() for g in reduced]
        if fault == "swapped" and hit:
            reduced[1], reduced[2] = reduced[2], reduced[1]
        if fault == "mixed" and hit:
            for one, other in ((1, 2), (2, 1)):
                reduced[one] = mean[one] + (
                    entering[rank][other] - entering[rank][one]
                ) / np.float32(ranks)
        if fault in ("twice-elsewhere", "sum-of-one") and hit:
            times = np.float32(ranks if fault == "sum-of-one" else 1 / ranks)
            reduced = [
                g * times if (i == target) == (fault == "sum-of-one") else g
                for i, g in enumerate(reduced)
            ]
        if fault == "one-more" and hit:
            reduced[target] = reduced[target] * np.float32(ranks / (ranks + 1))
        if fault == "scaled-tensor" and hit:
            reduced[target] = reduced[target] * np.float32(0.3)
        if fault == "nothing" and hit:
            reduced[target] = np.zeros_like(reduced[target])
        if fault == "stale" and hit and before is not None:
            reduced = [g.copy() for g in before]
        if fault == "tail" and hit:
            reduced[target].ravel()[-8:] = entering[0][target].ravel()[-8:]
        if fault in ("noise-added", "noise-always") and (hit or fault == "noise-always"):
            reduced = [
                g + np.float32(0.1) * random.standard_normal(g.shape).astype(np.float32)
                for g in reduced
            ]
        if fault.startswith("accumulating") and hit and previous is not None:
            reduced = [g + p for g, p in zip(reduced, previous, strict=True)]
        before = mean
        norm = float(np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in reduced)))
        # Clipped before the loss scale is taken out.
        length = norm * scale if fault == "clipped-scaled" else norm
        coefficient = min(1.0, clip / length) if clip and np.isfinite(length) else 1.0
        applied = [[g * np.float32(coefficient) for g in reduced] for _ in range(ranks)]
        if fault == "one-clips" and hit:
            applied = [
                [g * np.float32(0.1 if r == rank else 1.0) for g in reduced] for r in range(ranks)
            ]
        if fault.startswith("alone"):
            applied = [[g.copy() for g in tensors] for tensors in local]
            if fault == "alone-shared" and step == at:
                applied[1] = [g.copy() for g in applied[0]]
        if fault == "owners-reduced":
            # Parts of a sum reach the others on the way, as a tree leaves them.
            applied = [
                [g if i % ranks == r else g * np.float32(0.5 + r) for i, g in enumerate(reduced)]
                for r in range(ranks)
            ]
        rate = 0.05
        if fault == "schedule":
            rate = 0.05 * 0.97 ** (step * ranks)
        if fault == "no-rate":
            rate = 0.0
        if fault == "ended-schedule":
            rate = 0.05 * max(0.0, 1 - step / 20)
        if fault in ("early-milestones", "milestones"):
            every = 8 if fault == "early-milestones" else steps // 4
            rate = 0.05 * 0.1 ** min(3, step // every)
        if fault == "staircase":
            rate = 0.05 * 0.5 ** (step // 10)
        if fault == "slow-schedule":
            rate = 0.05 * 0.97**step
        row: list[Said] = []
        overflow = {
            "amp-collapse": hit,
            "amp-search": step < 3,
            "amp-often": step % 3 == 0,
            "skipped-overflow": step == at,
        }.get(fault, False)
        for r in range(ranks):
            said = Said()
            alone = fault == "skips" and r == rank and step == at
            stuck = fault in ("frozen", "holds-others-frozen", "converged", "tolerates") and hit
            if fault == "one-frozen" and hit:
                stuck = r == rank
            unchanged = 0
            if overflow or alone:
                skipped[r] += 1
                unchanged = len(NAMES)
            else:
                executed[r] += 1
                for i, gradient in enumerate(applied[r]):
                    velocity[r][i] = np.float32(0.9) * velocity[r][i] + gradient
                    still = stuck or (fault == "one-tensor-frozen" and hit and i == target)
                    if fault in ("gathered-late", "owners-reduced") and i % ranks != r:
                        continue
                    if still:
                        unchanged += 1
                        continue
                    held[r][i] = held[r][i] - np.float32(rate) * velocity[r][i]
            if overflow and scale:
                scale_now = scale
                if r == ranks - 1 and fault != "amp-often":
                    scale = max(scale / 2, 2**-20)
            else:
                scale_now = scale
            posted_norm = float(
                np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in applied[r]))
            )
            if fault == "converged" and hit:
                posted_norm *= 1e-6
            said.scalars |= {
                "loss": float(2 * np.exp(-0.02 * step) + 0.05 * ids[r] / epoch / ranks),
                "lr": rate,
                "grad_norm": posted_norm,
                "grad_norm_local": float(
                    np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in local[r]))
                ),
                "optimizer_steps": float(executed[r]),
                "micro_steps": 1.0,
            }
            if fault == "skipped-overflow" and overflow:
                said.scalars["grad_norm"] = float("inf")
            if fault == "resumed-elsewhere":
                said.scalars["optimizer_steps"] += 0 if r == rank else 1200
            if clip or fault == "one-clips":
                said.scalars["grad_norm_preclip"] = norm
            if clip or (fault == "one-clips" and r == rank):
                said.scalars["clip_coefficient"] = (
                    0.1 if fault == "one-clips" and hit else coefficient
                )
            if amp:
                said.scalars |= {"amp_scale": scale_now, "steps_skipped": float(skipped[r])}
                if fault == "one-scale" and hit and r == rank:
                    said.scalars["amp_scale"] = scale_now / 2
            drawn = {"idle-rng": 0, "epochs-rng": step // 7, "workers-rng": step // 7}.get(
                fault, step
            )
            if fault == "workers-rng":
                said.scalars["loader_workers"] = 2.0
            said.words |= {
                "batch": word(ids[r]),
                "outside_optimizer": written[r],
                "parameters": model_word(held[r]),
                "rng/torch": word("rng", drawn, 0 if fault.endswith("-rng") else r),
                "hyperparameters": word(rate),
            }
            if written[r]:
                said.scalars["parameters_written"] = 1.0
            if reads:
                samples = read(
                    reads, seed=seed, step=step, rank=r, ranks=ranks, epoch=epoch, batch=batch
                )
                said.words |= words_of_samples(samples, word)
            if fault.startswith("draws"):
                more = int(fault == "draws-more" and hit and r == rank)
                said.words["rng/torch"] = word("rng", step, r // groups, more)
            if (step % thin and step >= dense) or step in lost_looks:
                del said.words["batch"], said.words["rng/torch"]
            if full:
                said.scalars["tensors_unchanged"] = float(unchanged)
                if previous is not None:
                    one = np.concatenate([g.ravel() for g in reduced]).astype(np.float64)
                    two = np.concatenate([g.ravel() for g in previous]).astype(np.float64)
                    said.scalars["grad_cosine"] = float(
                        one @ two / np.linalg.norm(one) / np.linalg.norm(two)
                    )
                shown = local[r] if not amp else [g * np.float32(scale_now) for g in local[r]]
                said.print(step, "local_gradient", shown)
                said.print(step, "reduced_gradient", applied[r])
                said.print(step, "optimizer_state", velocity[r], "optimizer/momentum")
                said.print(step, "parameters", held[r])
            if fault.startswith("average") and full:
                # From the same parameters; of another weight where it is broken.
                weight = np.float32(
                    0.3 if fault == "average-differs" and hit and r == rank else 0.1
                )
                if fault == "average-apart" and hit:
                    weight = np.float32(0.1 + 0.1 * r)
                part = "watched/ema/buffers" if fault == "average-buffers" else "watched/ema"
                for kept, new in zip(averages[r], held[r], strict=True):
                    kept += weight * (new - kept)
                    if part != "watched/ema" and hit:
                        kept += np.float32(r)
                # Two of the ranks sample more often than the others.
                if fault != "average-apart" or r in (1, 2) or step % (2 * every) == 0:
                    said.words["watched"] = model_word(averages[r])
                    said.print(step, "watched", averages[r], part)
            if fault == "carried" or fault.startswith("fast-schedule"):
                said.scalars["gradient_carried"] = norm if fault == "carried" and hit else 0.0
            if fault == "accumulating-unseen" and step == 0:
                # Later gradients are of a sort that the hooks cannot measure.
                said.scalars["gradient_carried"] = 0.0
            if fault == "carried-once":
                said.scalars["gradient_carried"] = norm if step == at else 0.0
            if fault.startswith("carried-by-one"):
                kept = r == rank and (step == at if fault.endswith("-once") else hit)
                said.scalars["gradient_carried"] = norm if kept else 0.0
            if fault.startswith("fast-schedule") or fault == "kept-schedule":
                times = {"fast-schedule-3": 3, "kept-schedule": 1}.get(fault, ranks)
                said.scalars["scheduler_steps"] = float(times * step + 1)
                if fault == "fast-schedule-micro":
                    said.scalars["micro_steps"] = float(ranks)
                if fault == "fast-schedule-accelerate" and step == 0:
                    told = ("scheduler.wrapped", "by Accelerate", {"by": "accelerate"})
                    said.events.append(told)
            if fault.startswith("freezes") and step in (at, at + 8):
                # All of it is trained again where that is meant.
                names = [n for n in NAMES if not n.startswith("head")] if step == at else []
                if names or fault == "freezes-for-a-while":
                    told = {"names": names, "count": len(names)}
                    said.events.append(("parameters.frozen", "trained no longer", told))
            if fault.startswith("mode-"):
                tell_mode(said, fault.removeprefix("mode-"), step, at, concerned=r == rank)
            if fault.endswith("-batches") or fault == "more-tokens":
                size = np.random.default_rng((seed, step, r)).lognormal(4.0, 0.7)
                said.scalars["samples"] = {
                    "small-batches": 2.0 if hit and r == rank else 16.0,
                    "ragged-batches": float(round(size)),
                    "last-batches": 3.0 if place == epoch - 1 and r == rank else 16.0,
                }.get(fault, 16.0)
                if fault == "more-tokens":
                    said.scalars["tokens"] = 512.0 if hit and r == rank else 256.0
            if fault in ("epochs", "epochs-apart"):
                shorter = 1 if fault == "epochs-apart" and r == rank else 0
                said.scalars["epoch"] = step / (epoch - shorter)
            if fault == "nonfinite" and step == at:
                said.events.append(
                    (
                        "nonfinite",
                        "grad_norm not finite; 1 gradients hold such values",
                        {"scalars": ["grad_norm"], "gradients": {tensor: 1}, "tensors": 1},
                    )
                )
                if r == rank:
                    said.events.append(
                        (
                            "nonfinite",
                            "the first value that is not finite",
                            {
                                "module": "first",
                                "pass": "forward",
                                "input_finite": True,
                                "parameters_finite": True,
                            },
                        )
                    )
            row.append(said)
        previous = reduced
        run.append(row)
    if fault == "late":
        # It skipped a step and does not count it: what it says is a step older than it seems.
        for step in range(at, steps - 1):
            run[step][rank].scalars["grad_norm"] = run[step + 1][rank].scalars["grad_norm"]
    own_loop = (fault.startswith("alone") and fault != "alone-wrapped") or not wrapped
    configs = configs_of(fault, ranks, rank, reducer=reducer, wrapped=not own_loop)
    parts = ranks if dealt else groups
    if dealt:
        over = {"first": 0, "step": 1, "count": ranks}
        configs = [{**config, "sharded_over": over} for config in configs]
    tables = [
        {
            "parameters": table_of(_shard(r, parts), whole),
            "optimizer/momentum": table_of(_shard(r, parts), whole),
            **(
                {"watched/ema": table_of(), "watched/ema/buffers": table_of()}
                if fault.startswith("average")
                else {}
            ),
        }
        for r in range(ranks)
    ]
    began = (0, at) if fault in ("restart-replays", "restarts") else (0,)
    made = Posted(run, configs, tables, began)
    return made.without(*without) if without else made


def _shard(rank: int, parts: int) -> str:
    return "" if parts == 1 else f"Shard(0)@{rank % parts}/{parts}"
