"""Parameters that stay as they were: what was seen of them, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    listing,
    percent,
    ranks,
    sentences,
)
from rankscope.server.window import Window


@dataclass(slots=True)
class Still:
    """Parameters that do not move.

    Attributes:
        ranks: on which.
        tensors: how many, most of all; of `of`; 0 where only the whole model is known.
        whole: whether nothing moves at all.
        names: of the tensors, where they are known.
        held_elsewhere: whether the optimizer was known to hold other tensors from the start.
        never: samples at which they had a gradient and were as at first, from `never_since` on; 0
            where one of them was seen to move, or too few were examined.
        forgotten: they are few beside those that the optimizer holds, or `replaced`.
        replaced: the optimizer holds as many tensors in their place that are not the model's.
        adds_up: their gradients were never set to zero, at every sample.
        gained: share of the loss, where it is next to nothing; else NaN.
    """

    ranks: tuple[int, ...]
    tensors: int
    of: int
    whole: bool
    names: tuple[str, ...] = ()
    held_elsewhere: bool = False
    never: int = 0
    never_since: int = 0
    forgotten: bool = False
    replaced: bool = False
    adds_up: bool = False
    gained: float = math.nan


@dataclass(slots=True)
class Frozen:
    """Parameters that were trained and require no gradient any more.

    Attributes:
        names: of them, at most 500; of `count`.
        by_rank: rank -> how many.
    """

    names: tuple[str, ...]
    by_rank: dict[int, int]

    @property
    def count(self) -> int:
        """Most of a rank."""
        return max(self.by_rank.values())


@dataclass(slots=True)
class Unstepped:
    """Passes of a process that has never stepped, or not since its last step.

    Attributes:
        step: the one that has not ended.
        passes: backward passes for it.
        discarded: those whose gradients were set to zero, or replaced, again.
        forwards: forward passes of training for it, as far as they were counted.
        seconds: for how long.
        steps: that the process has ended before.
        ended: whether the process has ended so; `at_end`: whether it said so when it did.
    """

    step: int
    passes: int
    discarded: int
    forwards: int = 0
    seconds: int = 0
    steps: int = 0
    at_end: int = 0
    ended: bool = field(default=False, init=False)


def finding_of(episode: Episode[Still], window: Window) -> Finding:
    """Of parameters that steps leave as they were."""
    still, step = episode.facts, episode.first_step
    where = "" if len(still.ranks) == window.world_size else f" on {ranks(still.ranks)}"
    if still.whole:
        what = "No parameter moves"
    else:
        of = f" of {still.of}" if still.of else ""
        verb = agree(still.tensors, "does")
        what = f"{count(still.tensors, 'tensor')}{of} {verb} not move"
    why = (
        "Possibly the optimizer holds other tensors than the model (it was built before the "
        "model was wrapped, moved or given new parts), its learning rate for them is 0, or the "
        "update is smaller than the last bit of a 16-bit parameter."
    )
    remedy = (
        "Build the optimizer after the model has been moved, wrapped and changed; check the "
        "learning rates of its groups; keep 32-bit master weights where parameters have 16."
    )
    # What has moved at first is held by the optimizer.
    stops = _tolerances(window) if still.whole and step > _begin(window) else ""
    if stops:
        why = (
            f"It has a stopping rule ({stops}): such an optimizer leaves the parameters alone once "
            "its steps, or the gradient, are below it, or where its line search finds no step."
        )
        remedy = (
            "Nothing, if the loss is as low as it should be: the training has converged, and "
            "further steps are for nothing. Else lower the tolerances, or build the optimizer anew."
        )
    return episode.finding(
        kind="update.missing",
        severity="info" if stops else "critical" if still.whole else "warning",
        title=f"{what} since step {step} although there are gradients{where}",
        ranks=still.ranks,
        stage="parameters",
        cause=sentences(
            f"Since step {step}, `optimizer.step()` has left "
            + ("all parameters" if still.whole else "these parameters")
            + f" as they were, bit for bit, at {count(episode.seen, 'checked step')}{where}, "
            "although their gradients are not zero.",
            why,
        ),
        remedy=remedy,
        evidence={
            "tensors": still.tensors,
            "of": still.of,
            "whole": still.whole,
            "missing": list(still.names),
            "observed": episode.seen,
            **({"few": True} if 2 * still.tensors <= still.of else {}),
        },
    )


def unstepped_finding(found: Mapping[int, Unstepped], window: Window) -> Finding:
    """Of ranks that call `backward` and never step, or do not any more."""
    if all(one.steps for one in found.values()):
        return _stopped(found, window)
    who = tuple(sorted(found))
    where = "" if len(who) == window.world_size else f" on {ranks(who)}"
    passes = max(one.passes for one in found.values())
    discarded = max(one.discarded for one in found.values())
    ended = all(one.ended for one in found.values())
    step = min(one.step for one in found.values())
    return Incident.since(step, window.last_step).finding(
        kind="update.missing",
        key="unstepped",
        severity="critical",
        title=f"{'No optimizer step was made' if ended else 'No optimizer step has ended'} in "
        f"{count(passes, 'backward pass')}{where}",
        ranks=who,
        stage="optimizer",
        cause=sentences(
            f"Gradients were computed {passes:,} times since the monitor was attached{where}, and "
            "no step of an optimizer was seen: the model is not trained.",
            f"The gradients of {discarded:,} of these passes were thrown away again (`zero_grad`)."
            if discarded
            else "",
            "Usual causes: `optimizer.step()` is missing, or stands behind a condition that never "
            "holds; a loss scaler skips every step; the loop changes the parameters without a "
            "`torch.optim.Optimizer`.",
        ),
        remedy=(
            "Call `optimizer.step()` after `backward()`, at every step or at every n-th of an "
            "accumulation. Where the parameters are changed by other means, use `agent.start` and "
            "call `monitor.step` at each change."
        ),
        evidence={"passes": passes, "discarded": discarded, "ended": ended},
    )


def moved_finding(found: Mapping[int, Unstepped], window: Window) -> Finding:
    """Of ranks that never step, and whose parameters change all the same."""
    who = tuple(sorted(found))
    where = "" if len(who) == window.world_size else f" on {ranks(who)}"
    passes = max(one.passes for one in found.values())
    step = min(one.step for one in found.values())
    return Incident.since(step, window.last_step).finding(
        kind="update.missing",
        key="unstepped",
        severity="info",
        title=f"The parameters are changed by something else than an optimizer{where}",
        ranks=who,
        stage="optimizer",
        cause=(
            f"Gradients were computed {passes:,} times since the monitor was attached{where}, no "
            "step of an optimizer was seen, and the parameters change all the same: they come from "
            "a parameter server, or the loop updates them itself. Where no step ends, none is "
            "counted, and nothing is compared with other ranks."
        ),
        remedy=(
            "Nothing, if this is meant. To have these ranks watched, use `agent.start` and call "
            "`monitor.step` at each change; of asynchronous workers, `agent.parameter_server`."
        ),
        evidence={
            "passes": passes,
            "discarded": max(one.discarded for one in found.values()),
            "ended": all(one.ended for one in found.values()),
        },
    )


def _stopped(found: Mapping[int, Unstepped], window: Window) -> Finding:
    """Of ranks that have stepped, and compute on without a step."""
    who = tuple(sorted(found))
    where = "" if len(who) == window.world_size else f" on {ranks(who)}"
    passes = max(one.passes for one in found.values())
    forwards = max(one.forwards for one in found.values())
    seconds = max(one.seconds for one in found.values())
    step = min(one.step for one in found.values())
    made = count(passes, "backward pass") if passes else count(forwards, "forward pass")
    return Incident.since(step, window.last_step).finding(
        kind="update.missing",
        key="unstepped",
        severity="critical" if passes else "warning",
        title=f"No optimizer step has ended since step {step - 1} in {made}{where}",
        ranks=who,
        stage="optimizer",
        cause=sentences(
            f"{f'For {seconds} s' if seconds else 'Since then'}{where} the model has been run as "
            f"in training ({made} at least), and no step of an optimizer was seen: nothing is "
            "learnt any more.",
            "Usual causes: a condition skips every step (a loss or gradient that is not finite), "
            "the loop has changed to another optimizer, or a loss scaler skips the steps.",
            ""
            if passes
            else "Without a backward pass it may be an evaluation, in training mode and with "
            "gradients.",
        ),
        remedy=(
            "Look at the condition before `backward()` and `optimizer.step()`, and at what makes "
            "it hold; end a training that skips many steps in a row with an error. Call "
            "`model.eval()` and use `torch.no_grad()` where nothing is trained."
        ),
        evidence={
            "passes": passes,
            "discarded": max(one.discarded for one in found.values()),
            "forwards": forwards,
            "seconds": seconds,
            "ended": all(one.ended for one in found.values()),
        },
    )


def _begin(window: Window) -> int:
    """The step before which nothing was seen to move: a process's first one, or the next."""
    return 1 + min((begins[0] for begins in window.begins.values() if begins), default=0)


def _tolerances(window: Window) -> str:
    """The settings by which the optimizer stops of its own accord, as those of LBFGS do."""
    groups = window.config.get("parameter_groups")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, Mapping):
            names = [k for k in group if isinstance(k, str) and k.startswith("tolerance")]
            if names:
                return listing([f"`{name}` {group[name]}" for name in names], most=4)
    return ""


def frozen_finding(episode: Episode[Frozen], window: Window) -> Finding:
    """Of parameters that no longer require a gradient."""
    frozen, step = episode.facts, episode.first_step
    who = tuple(sorted(frozen.by_rank))
    where = "" if len(who) == window.world_size else f" on {ranks(who)}"
    of = int(window.config.get("parameter_tensors") or 0)
    # Frozen before anything has moved: that is how the training was set up.
    begins = [b[-1] for b in window.begins.values() if b]
    at_first = step <= min(begins, default=0)
    names = listing([f"`{name}`" for name in frozen.names], most=4)
    return Finding(
        kind="update.missing",
        key="frozen",
        severity="info" if at_first else "warning",
        title=f"{count(frozen.count, 'tensor')}{f' of {of}' if of else ''} "
        f"{agree(frozen.count, 'is')} frozen since step {step}{where}",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        ranks=who,
        tensors=frozen.names,
        stage="parameters",
        cause=sentences(
            f"Since step {step} at the latest {names} "
            f"{agree(frozen.count, 'requires')} no gradient{where}, and did when "
            "the monitor was attached: the optimizer holds them, and no step changes them.",
            "Something has set `requires_grad` to False on the way: possibly a schedule of "
            "freezing, a switch for another phase (evaluation, a second network) that was not "
            "taken back, or a condition that holds too long.",
        ),
        remedy=(
            "If it is meant, silence this alert. Else set `requires_grad` to True again, and look "
            "for what has frozen them."
        ),
        clear_after=0,
        evidence={
            "tensors": frozen.count,
            "of": of,
            "whole": False,
            "missing": [],
            "observed": episode.seen,
        },
    )


def outside_finding(still: Still, step: int, last_step: int) -> Finding:
    """Of parameters that the optimizer does not hold."""
    names = listing(list(still.names), most=4)
    if still.whole:
        title = f"The optimizer holds none of the model's {still.of} parameters"
        cause = (
            "When the monitor was attached, the optimizer held tensors of which none is a "
            f"parameter of the model: its steps change nothing of {names or 'the model'}. It was "
            "built before the model was wrapped, moved to a device or replaced."
        )
    else:
        left = agree(still.tensors, "is")
        title = (
            f"{still.tensors} of {count(still.of, 'trained tensor')} {left} not in the optimizer"
        )
        one = still.tensors == 1
        cause = (
            f"When the monitor was attached, the optimizer did not hold {names}, which "
            f"{'requires' if one else 'require'} a gradient: no step of it changes "
            f"{'it' if one else 'them'}."
        )
        if still.never:
            cause = sentences(
                cause,
                f"{'It has' if one else 'They have'} got gradients at "
                f"{count(still.never, 'checked step')} since step {still.never_since}, and "
                f"{'is' if one else 'are'} bit for bit what {'it was' if one else 'they were'}: no "
                "other optimizer has changed anything either.",
                f"{'Its gradient is' if one else 'Their gradients are'} never set to zero, since "
                "`optimizer.zero_grad()` reaches what the optimizer holds only: so "
                f"{'it adds' if one else 'they add'} up from step to step, and "
                f"{'is' if one else 'are'} part of the norm that clipping all parameters divides "
                "by."
                if still.adds_up
                else "",
                ""
                if still.forgotten
                else "Most of the model is left out, and the loss has gained "
                f"{percent(max(still.gained, 0.0))} so far: what is trained alone learns next to "
                "nothing."
                if math.isfinite(still.gained)
                else "It may be meant, since most of the model is left out.",
                "In their place it holds as many tensors that are not the model's: it was built "
                "from a copy, or before these layers were replaced or moved."
                if still.replaced
                else "",
            )
        else:
            cause += (
                " Another optimizer may do so; if none does, "
                f"{'it was' if one else 'they were'} possibly added or replaced after this one was "
                "built."
            )
    return Incident.since(step, last_step).finding(
        kind="update.missing",
        key="held",
        severity=(
            "critical"
            if still.whole
            else "warning"
            if still.forgotten or math.isfinite(still.gained)
            else "info"
        ),
        title=title,
        ranks=still.ranks,
        tensors=still.names,
        stage="start",
        cause=cause,
        remedy=(
            "Build the optimizer from `model.parameters()` after the model has been moved, wrapped "
            "and changed, or add what is missing with `add_param_group`. Set `requires_grad` to "
            "False for what is not to be trained."
        ),
        evidence={
            "tensors": still.tensors,
            "of": still.of,
            "whole": still.whole,
            "missing": list(still.names),
            "never_updated": still.never,
            "adds_up": still.adds_up,
        },
    )
