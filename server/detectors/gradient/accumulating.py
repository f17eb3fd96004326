"""Gradients that add up from step to step because nobody sets them to zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.gradient.applied_again import NAMES, AppliedAgain
from rankscope.server.detectors.gradient.kept_alone import KeptAlone
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step, together
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import agree, count, number, ranks
from rankscope.server.detectors.policy import Count, Policy, Share, Signed, Times
from rankscope.server.window import Check, Window


@dataclass(frozen=True, slots=True)
class AccumulatingPolicy(Policy):
    """Thresholds of `gradient.accumulating`.

    Attributes:
        certain: consecutive steps at which the gradients before the reduction show that they add
            up.
        alike: where those are not known: consecutive steps whose gradients have the direction of
            the one before.
        cosine: cosine from which on two gradients have the same direction.
        grown: growth of the norm over these steps that is needed.
        slack: norm as a share of the previous one, down to which it still counts as growing: noise
            makes it shorter now and then.
    """

    certain: Count = 2
    alike: Count = 8
    cosine: Signed = 0.8
    grown: Times = 2.0
    slack: Share = 0.9


@dataclass(slots=True)
class Adding:
    """What was seen.

    Attributes:
        certain: by sums or by what was there before, and not by direction and growth.
        emptied: whether the gradients were seen to be empty when the step's own were added; None
            where that was not seen.
        cosine, grown: of the last gradient to the one before; its norm over that at the onset.
    """

    certain: bool
    emptied: bool | None
    cosine: float
    grown: float


@dataclass(slots=True)
class AddingState:
    """What is remembered.

    Attributes:
        sums: reductions in a row that were the step before and this step's mean, since `since`.
        carried: samples in a row at which every rank still had an earlier gradient, since
            `carried_since`; -1 where the last one found none.
        keeping: ranks that still had an earlier gradient where others had none.
        alike: observations in a row that point the same way and grow, since `alike_since`.
    """

    judged: int = 0
    summed: int = 0
    sums: int = 0
    since: int = 0
    carried: int = 0
    carried_since: int = 0
    alike: int = 0
    alike_since: int = 0
    start_norm: float = 0.0
    last_norm: float = 0.0
    norms: dict[int, float] = field(default_factory=dict)
    keeping: tuple[int, ...] = ()
    watch: Watch[Adding] = field(default_factory=lambda: Watch(clear_after=16))
    alone: KeptAlone = field(default_factory=KeptAlone)
    again: AppliedAgain = field(default_factory=AppliedAgain)


class GradientAccumulating(Detector[AddingState]):
    """Each step's gradient contains those of the steps before: `zero_grad` is missing.

    Statistic:
        What is in the gradients when a step's own are added to them (`gradient_carried`), on every
        rank, at two samples in a row. Or, where both sides of the reduction are known at two
        consecutive steps: the reduced gradient is that of the step before plus the mean of this
        step's own, to 1e-3, twice in a row; named are the ranks that alone have carried something
        then. Else, a cosine above 0.8 to the gradient of the step
        before at 8 consecutive observations, while the norm grows to twice its size. Over after 16
        steps. Once is enough where some ranks carry something and the others do not, after 8
        samples at which none did (key `alone`). Or the gradient of a step is that of the one
        before, to the last digits (cosine and norm to 1e-5), and no loss was computed for it, at 4
        of the last 16 steps whose step before is known, too (key `again`).

    Severity:
        Critical by what was there and by sums, warning by direction, on some ranks once, and for
        gradients that are applied twice;
        direction says nothing where the optimizer does not hold all of the model, since the others'
        gradients add up.

    Evidence:
        `certain`, `emptied` (whether the gradients were empty when a step's own were added to them;
        null: not seen), `cosine`, `grown` (times the norm at the onset), `observed`.

    Source:
        Linear sketches: sketch(g_k) = sketch(g_(k-1)) + mean of sketches(local g_k).
    """

    kinds = ("gradient.accumulating",)
    wants = ("gradient_carried", *NAMES)

    policy: AccumulatingPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive steps that carry gradients on; of zeros nothing is carried."""
        carried = "gradient_carried", "grad_cosine", "reductions"
        return (
            # The first step has nothing before it that could be carried on.
            Reach(carried, self.policy.certain + 1, LASTS_SAMPLED),
            Reach(("grad_norm",), moves="from zero"),
        )

    def advance(self, window: Window, state: AddingState) -> Outcome:
        """Goes through reductions, and through directions where there are none."""
        patterns = {made.step: made for made in window.reductions if made.agreed and made.known}
        whole = all(_holds_all(config) for config in (window.config, *window.configs.values()))
        cosines = mean_by_step(window, "grad_cosine") if whole else {}
        norms = mean_by_step(window, "grad_norm")
        held, rows = rank_rows(window, "gradient_carried")
        carried = dict(zip(held.tolist(), np.fmin.reduce(rows, axis=1).tolist(), strict=True))
        keep = {
            step: tuple(window.ranks[row > 0].tolist())
            for step, row in zip(held.tolist(), rows, strict=True)
            if 0 < np.count_nonzero(row > 0) < np.count_nonzero(~np.isnan(row))
        }
        each = dict(zip(held.tolist(), rows, strict=True))
        # A process's first step has nothing before it: empty there says nothing of later ones.
        firsts = {step for begins in window.begins.values() for step in begins}
        carried = {s: size for s, size in carried.items() if s not in firsts or not size <= 0}
        for step in sorted({*patterns, *cosines, *carried}):
            norm = norms.get(step, float("nan"))
            state.judged += 1
            if step in each:
                state.alone.observe(step, window.ranks, each[step])
            if step in carried:
                self._carried(state, step, carried[step], norm)
                if state.carried >= self.policy.certain:
                    self._found(state, step, cosines.get(step, float("nan")), norm, certain=True)
                    continue
            if step in patterns:
                state.summed += 1
                adds = patterns[step].pattern == "accumulated"
                if adds:
                    if not state.sums:
                        state.since, state.start_norm = step, norm
                    state.sums += 1
                elif patterns[step].pattern == "" and state.sums:
                    state.sums = 0
                by_some = step in keep and state.alone.watch.open(step) is not None
                if adds and state.sums >= self.policy.certain and not by_some:
                    self._found(state, step, cosines.get(step, float("nan")), norm, certain=True)
                    state.keeping = keep.get(step, state.keeping)
                    continue
            if step in cosines and np.isfinite(norm):
                self._direction(state, step, cosines[step], norm)
            if (
                max(state.sums, state.carried) < self.policy.certain
                and state.alike < self.policy.alike
            ):
                state.watch.good(step)
        findings = tuple(
            _finding(e, window, state.keeping) for e in state.watch.take(window.last_step)
        )
        more = state.alone.findings(window)
        more += state.again.take(window, dict(together(window, *NAMES)))
        return Outcome({"gradient.accumulating": _check(state)}, (*findings, *more))

    def _carried(self, state: AddingState, step: int, size: float, norm: float) -> None:
        if np.isnan(size):
            return  # something that is not finite: nobody can say that it was added
        if size <= 0:
            state.carried = -1
            return
        if state.carried <= 0:
            state.carried, state.carried_since = 0, step
            if state.alike < self.policy.alike and not state.sums:
                state.start_norm = norm
        state.carried += 1

    def _direction(self, state: AddingState, step: int, cosine: float, norm: float) -> None:
        # Sums have been examined and said no: that counts for more than the direction.
        known = (state.summed > self.policy.alike and not state.sums) or state.carried < 0
        if cosine < self.policy.cosine or norm < self.policy.slack * state.last_norm or known:
            state.alike = 0
            state.last_norm = norm
            return
        if not state.alike:
            state.alike_since, state.start_norm = step, state.last_norm or norm
        state.alike += 1
        state.last_norm = norm
        if state.alike >= self.policy.alike and norm >= self.policy.grown * state.start_norm:
            self._found(state, step, cosine, norm, certain=False)

    def _found(
        self, state: AddingState, step: int, cosine: float, norm: float, *, certain: bool
    ) -> None:
        grown = norm / state.start_norm if state.start_norm > 0 else float("nan")
        since = state.since if certain else state.alike_since
        if state.carried >= self.policy.certain:
            since = min(state.carried_since, since) if state.sums else state.carried_since
        emptied = None if not state.carried else state.carried < 0
        found = Adding(certain, emptied, cosine, grown)
        facts = state.watch.bad(step, found, first_step=since).facts
        facts.cosine, facts.grown, facts.certain = cosine, grown, facts.certain or certain
        facts.emptied = emptied


def _holds_all(config: Mapping[str, Any] | None) -> bool:
    """Whether the optimizer holds all that is trained, as far as a rank has said."""
    reported = (config or {}).get("optimizer_tensors")
    return not (
        isinstance(reported, Mapping) and reported.get("missing_count") and reported.get("count")
    )


def _finding(episode: Episode[Adding], window: Window, keeping: tuple[int, ...]) -> Finding:
    adding, step = episode.facts, episode.first_step
    who = ranks(keeping)
    whose = f" of {who}" if keeping else ""
    remedy = (
        "Call `optimizer.zero_grad()` once after each `optimizer.step()` (under accumulation: "
        "after the last micro-batch's step), on the optimizer that holds these parameters, "
        f"and go back to a checkpoint from before step {step}."
    )
    if keeping:
        cause = (
            f"Since step {step}, the reduced gradient contains that of the step before, seen at "
            f"{count(episode.seen + 1, 'checked step')}: {who} {agree(len(keeping), 'does')} not "
            "set its gradients to zero between steps, and the other ranks do. So all ranks apply "
            "a part of old gradients again."
        )
        remedy = (
            "Call `optimizer.zero_grad()` on every rank once a step: look for a condition on the "
            f"rank around it. Go back to a checkpoint from before step {step}."
        )
    elif adding.emptied:
        cause = (
            f"Since step {step}, the optimizer applies the previous step's gradient plus this "
            f"step's own, seen at {count(episode.seen + 1, 'checked step')}, although the "
            "gradients were set to zero: they were empty when the step's own were added. So "
            "they are added up after the backward pass, by the reduction or by code that keeps "
            "gradients."
        )
        remedy = (
            "Look at what handles gradients between the backward pass and the step: a "
            "communication hook, a buffer that is reduced and not emptied, gradients that are kept "
            f"and added. Go back to a checkpoint from before step {step}."
        )
    elif adding.certain:
        cause = (
            f"Since step {step}, the optimizer applies the previous step's gradient plus this "
            f"step's own, seen at {count(episode.seen + 1, 'checked step')}: "
            + (
                "gradients are not set to zero between steps, so that old gradients are applied "
                "again and the steps grow."
                if adding.emptied is False
                else "as happens when gradients are not set to zero between steps. Rankscope "
                "could not see whether they were."
            )
        )
    else:
        cause = (
            f"Since step {step}, each gradient has the direction of the one before it (cosine "
            f"{number(adding.cosine)}) and is longer, by now {number(adding.grown)} times, as "
            "happens when gradients are not set to zero between steps. Rankscope could not see "
            "the gradients before the reduction, which would settle it."
        )
    return episode.finding(
        kind="gradient.accumulating",
        severity="critical" if adding.certain else "warning",
        title=f"Gradients{whose} add up from step to step since step {step}",
        ranks=keeping or tuple(int(r) for r in window.ranks),
        stage="local_gradient",
        cause=cause,
        remedy=remedy,
        evidence={
            "certain": adding.certain,
            "emptied": adding.emptied,
            "cosine": adding.cosine,
            "grown": adding.grown,
            "observed": episode.seen,
        },
    )


def _check(state: AddingState) -> Check:
    if not state.judged:
        return Check.missing(
            "No rank posts fingerprints of its gradients at two consecutive steps.",
            early="No two consecutive steps have been examined yet.",
        )
    return Check.ok(f"Every step's gradient was its own at {count(state.judged, 'checked step')}.")
