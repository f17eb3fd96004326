"""What a compressed reduction leaves of the gradient."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.reduction_series import value_of
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import count, listing, number, percent
from rankscope.server.detectors.policy import Count, Policy, Share, Steps
from rankscope.server.window import Check, Reduction, Window


@dataclass(frozen=True, slots=True)
class CompressionPolicy(Policy):
    """Thresholds of `compression.error`.

    Attributes:
        low: cosine of the compressed gradient to the real one, below which it is reported; with
            error feedback, its size over the real one's has to be below it too.
        none: the same, below which it is critical.
        part: how much larger than the cosine the size may be, without a hook, where what is left
            out is lost: two standard errors of the median of 8 cosines (1.25 / sqrt(8) of 0.125).
        looks: number of samples whose median is judged.
        calm: steps without it after which it is over.
    """

    low: Share = 0.5
    none: Share = 0.1
    part: Share = 0.11
    looks: Count = 8
    calm: Steps = 8


@dataclass(slots=True)
class Loss:
    """What was seen: the median cosine, that of the norms, and what compresses."""

    cosine: float
    kept: float
    hooks: tuple[str, ...]


@dataclass(slots=True)
class CompressionState:
    """What `compression.error` remembers."""

    cosines: deque[float]
    kept: deque[float]
    watch: Watch[Loss]
    measured: int = 0


class CompressionError(Detector[CompressionState]):
    """Gradients are compressed so far that steps go elsewhere.

    Statistic:
        Cosine of what came out of the reduction to the mean of what the ranks put in, from their
        sketches, over all tensors: the median of the last 8 samples is below 0.5. Its standard
        error is at most 0.125 near 0 and vanishes near 1. Without a communication hook only where
        nothing else explains what came out (that is `reduction.wrong`), and elements of a tensor
        that went in came out as zeros, which came out at the sampled step before: noise and
        penalties leave no zeros, masks always the same ones. Of elements that are kept and others
        that are lost the size, without clipping and loss scale, is the cosine; with what was left
        out before it is larger. With error feedback (PowerSGD) a step leaves out what
        a later one makes good, and its direction is no measure: of a gradient g and a memory e,
        PowerSGD sends a projection m and keeps the rest e', so that |m|^2 = |g|^2 + 2 g.e + |e|^2 -
        |e'|^2. As long as the memory does not grow, what comes out is as long as what goes in, and
        only where the median of the norms' ratio is below 0.5, too, is it reported. Over after 8
        steps without it.

    Severity:
        Warning; critical below 0.1, where a negligible part of the gradient is left.

    Evidence:
        `cosine`, `lost` (share of the gradient's power that is not in the step), `kept` (what came
        out over what went in, where the hook feeds its errors back; else the cosine), `hooks`.

    Source:
        Vogels, Karimireddy and Jaggi (2019), PowerSGD, and torch's advice to begin with it after a
        tenth of the steps: what is lost in the first ones is not made good.
    """

    kinds = ("compression.error",)
    wants = ("clip_coefficient", "amp_scale")
    min_ranks = 2

    policy: CompressionPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """As many reductions as the median is of."""
        return (Reach(("reductions",), self.policy.looks, TO_THE_END),)

    def start(self) -> CompressionState:
        """Nothing examined yet."""
        looks = self.policy.looks
        return CompressionState(deque(maxlen=looks), deque(maxlen=looks), Watch(self.policy.calm))

    def advance(self, window: Window, state: CompressionState) -> Outcome:
        """Goes through the reductions whose both sides are known."""
        hooks, feedback = _hooks(window), _feeds_back(window)
        for made in window.reductions:
            if not made.agreed or not math.isfinite(made.cosine):
                continue
            if not hooks and not _loses_elements(made):
                state.cosines.clear()
                state.kept.clear()
                state.watch.good(made.step)
                continue
            state.measured += 1
            state.cosines.append(made.cosine)
            # Without feedback a part of the gradient is all that can come out. Nobody reports what
            # is compressed by hand: its size says whether errors are fed back.
            fed_back = (feedback or not hooks) and math.isfinite(made.kept)
            state.kept.append(_kept(window, made) if fed_back else made.cosine)
            loss = Loss(median(state.cosines), median(state.kept), hooks)
            few = len(state.cosines) < self.policy.looks
            if not hooks and loss.kept > loss.cosine + self.policy.part:
                state.watch.good(made.step)
                continue
            if few or loss.cosine >= self.policy.low or loss.kept >= self.policy.low:
                state.watch.good(made.step)
                continue
            state.watch.bad(made.step, loss).facts = loss
        findings = tuple(_finding(e, self.policy) for e in state.watch.take(window.last_step))
        return Outcome({"compression.error": _check(state, hooks, self.policy)}, findings)


def _loses_elements(made: Reduction) -> bool:
    """Whether some elements came out, zeros in place of others, and nothing else explains it."""
    other = made.pattern == "other" or any(t.how == "other" for t in made.wrong)
    return other and made.emptied > 0


def _kept(window: Window, made: Reduction) -> float:
    """Norm of what came out over that of the mean, without clipping and loss scale."""
    if made.pattern != "other":
        return made.kept
    clip, scale = (value_of(window, made, n) for n in ("clip_coefficient", "amp_scale"))
    return made.kept * (1.0 if scale is None else scale) / (1.0 if clip is None else clip)


def _hooks(window: Window) -> tuple[str, ...]:
    parallel = window.config.get("data_parallel")
    found = parallel.get("communication_hooks") if isinstance(parallel, dict) else None
    return tuple(str(name) for name in found) if isinstance(found, list | tuple) else ()


def _feeds_back(window: Window) -> bool:
    """Whether what is left out of a step is added to the next one's gradient."""
    parallel = window.config.get("data_parallel")
    low = parallel.get("low_rank") if isinstance(parallel, dict) else None
    return isinstance(low, dict) and low.get("feedback") is True


def _finding(episode: Episode[Loss], policy: CompressionPolicy) -> Finding:
    facts, step = episode.facts, episode.first_step
    lost = 1.0 - max(facts.cosine, 0.0) ** 2
    names = listing([f"`{name}`" for name in facts.hooks]) or "the reduction"
    return episode.finding(
        kind="compression.error",
        severity="critical" if facts.cosine < policy.none else "warning",
        title=(
            f"Compression leaves a gradient of cosine {number(facts.cosine)} to the real one since "
            f"step {step}"
        ),
        stage="reduced_gradient",
        cause=(
            f"What {names} makes of the ranks' gradients holds {percent(1.0 - lost)} of the "
            f"power of their mean (median of {count(policy.looks, 'sample')}); the rest is lost "
            "or comes in later steps. Early in training, where gradients change fast, it is out "
            "of date by then."
        ),
        remedy=(
            "Compress less: a higher rank or share, or 16-bit gradients (`bf16_compress_hook`), "
            "which keep nearly all of it. Begin to compress after the first tenth of the steps "
            "(`start_powerSGD_iter`), and switch error feedback on."
        ),
        evidence={
            "cosine": facts.cosine,
            "lost": lost,
            "kept": facts.kept,
            "hooks": list(facts.hooks),
        },
    )


def _check(state: CompressionState, hooks: tuple[str, ...], policy: CompressionPolicy) -> Check:
    if not hooks and not state.cosines:
        return Check.not_applicable("Nothing that compresses gradients is known or seen.")
    if not state.measured:
        why = (
            "No step has the gradients of all ranks before the reduction and after it: they are "
            "read at sampled steps only, and not under FSDP."
        )
        return Check.missing(why, early=f"0 reductions of {policy.looks} needed.")
    if len(state.cosines) < policy.looks:
        return too_few(state.measured, "reduction", policy.looks)
    return Check.ok(
        f"The reduced gradient has a cosine of {number(median(state.cosines))} to the mean of the "
        f"ranks' gradients, the median of {count(len(state.cosines), 'sample')}."
    )
