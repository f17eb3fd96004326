"""Parameters that no optimizer is to move, and that something has changed on all ranks."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.effects import Rule
from rankscope.server.detectors.mechanisms.incident import AGREED_UNTIL, Incident
from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    listing,
    percent,
    ranks,
    sentences,
)
from rankscope.server.window import Check, Window

_EVENT = "parameters.written"
_BETWEEN, _BEFORE = "layers.frozen", "layers.untrained"
# Observations of the deviance explained after which it shows what came of layers that nobody
# trained, and the latest of them that are averaged; and the share below which that is nothing.
# Random features may do: a head on them learns what is easy, and explained 0.12 where it was meant.
_OBSERVED, _LATEST, _LITTLE = 100, 20, 0.02
# What is written at one interval is written again after as many steps as it took until the first
# time. Nobody is kept waiting for longer than this: target networks are brought up to date after
# 100 to 1,000 steps, epochs of larger ones may end later.
_LONGEST_WAIT = 1024


@dataclass(slots=True)
class Write:
    """One tensor.

    Attributes:
        steps: rank -> steps at which the rank found it changed, two at most.
        unchanged_until: last step at which every rank had found it unchanged; -1 for none.
    """

    steps: dict[int, list[int]] = field(default_factory=dict)
    unchanged_until: int = -1

    @property
    def first_step(self) -> int:
        """First step at which a rank found it changed."""
        return min(steps[0] for steps in self.steps.values())

    def reported_at(self, begin: int) -> int:
        """Step at which it is certain that it was written once, and not at one interval."""
        found = max(steps[0] for steps in self.steps.values())
        return max(found, self.first_step + min(self.first_step - begin, _LONGEST_WAIT) + 1)

    @property
    def again(self) -> int | None:
        """First step at which a rank found it changed once more; None for none."""
        return min((steps[1] for steps in self.steps.values() if len(steps) > 1), default=None)


@dataclass(slots=True)
class FrozenState:
    """What is remembered.

    Attributes:
        steps: how many there were.
        begin, last_step: the first and the last one.
        writes: by tensor.
        closed: tensors that are written again and again.
        between: rank -> tensors between trained ones that are as they were initialised.
        before: rank -> tensors before what is trained that are so.
        starts: rank -> how many of its processes have begun.
        explained: the latest shares of the deviance explained; `observed` so many, and `little` the
            mean of the latest once they are enough.
    """

    begin: int = -1
    last_step: int = -1
    writes: dict[str, Write] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    between: dict[int, tuple[str, ...]] = field(default_factory=dict)
    before: dict[int, tuple[str, ...]] = field(default_factory=dict)
    explained: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    starts: dict[int, int] = field(default_factory=dict)
    observed: int = 0
    reached: float = math.nan


class UpdateFrozen(Detector[FrozenState]):
    """Parameters that require no gradient have changed, or were never meant to be frozen.

    Frozen weights (the base of LoRA, a backbone) stay what they are: no optimizer moves them. What
    changes them is a write in place, meant or not: adapters merged into their base, a checkpoint
    that was loaded, a stray `copy_`, a fault of memory in a run of one process. Where they change
    on some ranks only, that is `desync.parameters`. And a layer that nobody has trained is no use
    where it is frozen: what is trained before it has to learn through numbers drawn at random.

    Statistic:
        Bits of a tensor that 8 readings had found unchanged, and the next one did not, on every
        rank. Not where they are then the bits of a trained parameter (a target network that is
        brought up to date). It is reported after as many steps as there were before it (1,024
        at most), unless the tensor has changed again by then: what is written again and again (an
        average of the weights) is written on purpose. Over as soon as it changes again. Layers are
        frozen by accident (key `between`) whose weights are torch's own draw still (the largest
        within 20 / n of the limit 1 / sqrt(fan in), the variance within 5 standard errors), through
        which gradients pass to trained ones, and that hold less than 1.5 times as many numbers as
        these; so are (key `before`) two or more, with more than a third of all frozen numbers,
        where these are most of the model.

    Severity:
        Info: nothing shows that it was not meant. Warning for layers that are frozen by accident;
        of those before what is trained where the last 20 of the first 100 observations of the
        deviance explained come to less than 0.02.

    Evidence:
        `agreed_until` (last step at which all ranks had found it unchanged), `count`, `steps` (the
        step at which each rank found it).

    Source:
        Each rank reads its own (`parameters.written` and `layers.frozen` events).
    """

    kinds = ("update.frozen",)
    wants = ("explained_deviance",)
    lasting = "what was written stays different from what it was: the next reading finds it"
    effects = (
        Rule(
            root=("desync.parameters",),
            consequence=("update.frozen",),
            earliest=-1,
            why="every rank has written values of its own",
        ),
    )

    def advance(self, window: Window, state: FrozenState) -> Outcome:
        """Takes what the ranks report."""
        state.last_step = max(state.last_step, window.last_step)
        if state.begin < 0 and len(window.steps):
            state.begin = int(window.steps[0])
        for rank, begins in window.begins.items():
            if len(begins) > state.starts.get(rank, 1):
                # Its weights may be others now: it says so again where they are not.
                state.before.pop(rank, None)
                state.between.pop(rank, None)
            state.starts[rank] = len(begins)
        for event in window.events:
            names = event.data.get("tensors")
            if event.kind in (_BETWEEN, _BEFORE) and isinstance(names, list | tuple):
                found_by = state.between if event.kind == _BETWEEN else state.before
                found_by[event.rank] = tuple(map(str, names))
            if event.kind != _EVENT or not isinstance(names, list | tuple):
                continue
            until = event.data.get("unchanged_until", -1)
            for name in map(str, names):
                write = state.writes.setdefault(name, Write())
                steps = write.steps.setdefault(event.rank, [])
                if len(steps) < 2:
                    steps.append(event.step)
                if len(steps) == 1 and isinstance(until, int):
                    write.unchanged_until = max(write.unchanged_until, until)
        everyone = {*window.ranks.tolist()}
        found: dict[int, list[str]] = {}
        findings: list[Finding] = []
        for name, write in state.writes.items():
            if name in state.closed or not everyone or not everyone <= write.steps.keys():
                continue
            reported_at, again = write.reported_at(state.begin), write.again
            if again is not None and again <= reported_at:
                state.closed.add(name)
            elif reported_at <= state.last_step:
                found.setdefault(write.first_step, []).append(name)
        for names in found.values():
            ends = [s for s in (state.writes[name].again for name in names) if s is not None]
            if ends:
                state.closed.update(names)
            last_step = min(ends) - 1 if ends else state.last_step
            findings.append(
                _finding(
                    state, names, max(last_step, state.writes[names[0]].reported_at(state.begin))
                )
            )
        for share in mean_over_ranks(window, "explained_deviance")[1].tolist():
            if math.isfinite(share):
                state.explained.append(share)
                state.observed += 1
                if state.observed == _OBSERVED:
                    state.reached = float(np.mean(state.explained))
        if state.between:
            findings.append(_between(state))
        if state.before:
            findings.append(_before(state))
        return Outcome({"update.frozen": self._check(window)}, tuple(findings))

    def _check(self, window: Window) -> Check:
        held = window.config.get("frozen_tensors")
        if not held:
            why = "The model has no parameter that is frozen."
            return Check.not_applicable(why, early="Nothing is known of the parameters yet.")
        return Check.ok(f"No rank has seen one of {count(int(held), 'frozen tensor')} change once.")


def _finding(state: FrozenState, names: list[str], last_step: int) -> Finding:
    writes = [state.writes[name] for name in names]
    step = writes[0].first_step
    who = tuple(sorted(writes[0].steps))
    until = max(write.unchanged_until for write in writes)
    what = f"{count(len(names), 'frozen tensor')} {'has' if len(names) == 1 else 'have'} changed"
    return Finding(
        kind="update.frozen",
        key=f"step:{step}",
        severity="info",
        title=f"{what} at step {step} ({listing(names, most=1)})"[:118],
        seen_step=max(write.reported_at(state.begin) for write in writes),
        last_step=last_step,
        first_step=step,
        ranks=who,
        tensors=tuple(names),
        stage="outside_optimizer",
        cause=(
            f"{listing(names, most=4)} {agree(len(names), 'requires')} no gradient, and no "
            f"optimizer moves {'it' if len(names) == 1 else 'them'}. Between step {until} and step "
            f"{step} something else did, on {ranks(who)}: adapters were merged into "
            "their base or taken out again (which leaves rounding), a checkpoint was loaded, code "
            "wrote in place."
        ),
        remedy=(
            "Nothing, if this is meant. Else look for what writes to "
            f"{listing(names, most=1)} between two steps."
        ),
        clear_after=0,
        evidence={
            AGREED_UNTIL: until,
            "count": len(names),
            "steps": {str(rank): writes[0].steps[rank][0] for rank in who},
        },
    )


def _before(state: FrozenState) -> Finding:
    names = tuple(dict.fromkeys(name for held in state.before.values() for name in held))
    little = state.reached < _LITTLE
    return Incident.since(state.begin, state.last_step, clear_after=0).finding(
        kind="update.frozen",
        key="before",
        severity="warning" if little else "info",
        title=(
            f"Most of the model is frozen as initialised: {count(len(names), 'tensor')} "
            f"({listing(list(names), most=1)})"
        )[:118],
        ranks=tuple(sorted(state.before)),
        tensors=names,
        stage="parameters",
        cause=sentences(
            f"{listing(list(names), most=4)} {agree(len(names), 'requires')} no gradient and "
            f"{agree(len(names), 'holds')} what torch draws for a new layer: what is trained works "
            "with the random features that they make, where a trained model was meant.",
            f"After {_OBSERVED} observations {percent(max(state.reached, 0.0))} of the deviance "
            "was explained."
            if math.isfinite(state.reached)
            else "",
        ),
        remedy=(
            "Load the weights of the trained model before it is frozen, and look at what "
            "`load_state_dict` returns (`strict=False` hides names that do not fit); or take "
            "`requires_grad_(False)` out. If random features are meant, silence this alert."
        ),
        evidence={"count": len(names)},
    )


def _between(state: FrozenState) -> Finding:
    names = tuple(dict.fromkeys(name for held in state.between.values() for name in held))
    them = "them" if len(names) > 1 else "it"
    return Incident.since(state.begin, state.last_step, clear_after=0).finding(
        kind="update.frozen",
        key="between",
        severity="warning",
        title=(
            f"{count(len(names), 'tensor')} between trained ones {agree(len(names), 'is')} frozen "
            f"as initialised ({listing(list(names), most=1)})"
        )[:118],
        ranks=tuple(sorted(state.between)),
        tensors=names,
        stage="parameters",
        cause=(
            f"{listing(list(names), most=4)} {agree(len(names), 'requires')} no gradient and "
            f"{agree(len(names), 'holds')} what torch draws for a new layer, while gradients pass "
            f"through {them} to layers that are trained: nobody ever trained {them}, and nobody "
            "does."
        ),
        remedy=(
            "Look for `requires_grad_(False)` with names or an order of modules that match more "
            "than was meant, or for a checkpoint whose weights were not loaded (`strict=False`). "
            "If the layer is a random projection on purpose, silence this alert."
        ),
        evidence={"count": len(names)},
    )
