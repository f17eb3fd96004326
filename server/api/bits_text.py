"""What the comparison of two runs' bits came to, as JSON and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankscope.server.api import comparison_models as shapes
from rankscope.server.api.models import Run, TensorDifference
from rankscope.server.detectors.mechanisms.wording import listing, ranks
from rankscope.server.evaluation.two_runs import Bits


def bit_comparison(
    runs: Sequence[Run],
    bits: Bits | None,
    *,
    same_seed: bool | None,
    seeds: Sequence[dict[str, Any]],
) -> shapes.BitComparison:
    """What was compared, what came of it, and what was not compared.

    Args:
        bits: None where nothing was examined, as the seeds differ.
    """
    found = bits or Bits()
    first = _first(found)
    left_out = _left_out(runs, bits, same_seed)
    if first is not None:
        state, summary = "differ", _difference(found, first)
    elif found.steps:
        state, summary = "equal", _equality(found)
    else:
        state, summary = "not_compared", f"The bits were not compared: {left_out[0]}"
    return shapes.BitComparison.model_validate(
        {
            "state": state,
            "summary": summary,
            "same_seed": same_seed,
            "seeds": list(seeds),
            "first": first,
            "ranks": list(found.ranks),
            "steps": found.steps,
            "first_step": found.first_step,
            "last_step": found.last_step,
            "not_compared": left_out,
        }
    )


def _first(bits: Bits) -> shapes.FirstDifference | None:
    if bits.first is None:
        return None
    return shapes.FirstDifference(
        step=bits.first.step,
        after=bits.before,
        stage=bits.first.stage,
        ranks=list(bits.first.ranks),
        tensor=bits.tensors[0].name if bits.tensors else None,
        tensor_step=None if bits.named_at is None else bits.named_at[0],
        tensor_stage=None if bits.named_at is None else bits.named_at[1],
        tensors=[
            TensorDifference(
                name=t.name,
                shape=list(t.shape),
                ranks=list(t.ranks),
                distance=t.distance,
                relative=t.relative,
                buckets=t.buckets,
                table=t.table,
            )
            for t in bits.tensors
        ],
    )


def _equality(bits: Bits) -> str:
    held = f"{_capital(ranks(bits.ranks))} held the same bits in both runs at"
    if bits.steps == 1:
        return f"{held} step {bits.first_step}, the only one that both sampled."
    return (
        f"{held} all {bits.steps:,} steps that both sampled, from {bits.first_step} to "
        f"{bits.last_step}."
    )


def _difference(bits: Bits, first: shapes.FirstDifference) -> str:
    where = first.stage.replace("_", " ")
    verb = "differ" if len(first.ranks) > 1 else "differs"
    text = f"{_capital(ranks(first.ranks))} {verb} from step {first.step} on, at {where}"
    if first.tensor is None:
        text += "; no fingerprints of both runs from there on name the tensor"
    else:
        names = listing([t.name for t in first.tensors], most=3)
        at = (first.tensor_stage or "").replace("_", " ")
        if (first.tensor_step, first.tensor_stage) == (first.step, first.stage):
            text += f", in {names}"
        elif first.tensor_step == first.step:
            text += f"; in the {at} of that step it is {names}"
        else:
            text += (
                f"; the next fingerprints of both, {at} of step {first.tensor_step}, name {names}"
            )
    if first.after is None:
        return f"{text}. No step before that was sampled in both runs."
    return f"{text}. The last step before that was compared, {first.after}, was equal."


def _left_out(runs: Sequence[Run], bits: Bits | None, same_seed: bool | None) -> list[str]:
    """What was not compared, and why: sentences."""
    if bits is None:
        return ["Their configurations name different seeds."]
    if bits.other_tensors:
        return ["Their parameters are other tensors, or other shards of them."]
    said = []
    for here, there in (runs, runs[::-1]):
        alone = sorted(set(here.ranks) - set(there.ranks))
        if alone:
            said.append(f"{_capital(ranks(alone))} of {here.id}: {there.id} has none such.")
    if not bits.steps:
        said.insert(0, _no_common_step(runs, bits))
        return said
    missing = sorted((set(runs[0].ranks) & set(runs[1].ranks)) - set(bits.ranks))
    if missing:
        said.append(f"{_capital(ranks(missing))}: not sampled at the same steps.")
    if bits.first is not None:
        said.append(f"Steps after {bits.first.step}: what follows from a difference differs.")
        return said
    assert bits.last_step is not None
    end = min(run.last_step for run in runs)
    if bits.last_step < end:
        said.append(
            f"Steps from {bits.last_step + 1} on: none of them was sampled in both runs "
            f"(sampled: {bits.sampled[0]:,} steps of {runs[0].id}, {bits.sampled[1]:,} of "
            f"{runs[1].id}, {bits.steps:,} of them in both)."
        )
    longer = max(runs, key=lambda run: run.last_step)
    if longer.last_step > end:
        said.append(f"Steps from {end + 1} on: only {longer.id} has them.")
    return said


def _no_common_step(runs: Sequence[Run], bits: Bits) -> str:
    for run, sampled in zip(runs, bits.sampled, strict=True):
        if not sampled:
            return f"{run.id} has no digests."
    return (
        f"No step was sampled in both runs ({bits.sampled[0]:,} of {runs[0].id}, "
        f"{bits.sampled[1]:,} of {runs[1].id})."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
