"""Steps of an optimizer none of whose parameters has a gradient any more. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.by_rank import ByRank
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.gradients_made import GradientsMade
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    if_several,
    number,
    ranks,
    sentences,
)
from rankscope.server.detectors.profiles import TURNS
from rankscope.server.detectors.update.some_steps import SomeSteps
from rankscope.server.window import Window

_UPDATE, _NORM = "update_ratio", "grad_norm"
# Sampled steps with gradients, before, and without any, in a row: one or two may be steps whose
# gradients were taken away on purpose.
_BEFORE, _IN_A_ROW = 8, 8


@dataclass(slots=True)
class Gone:
    """What was seen: sampled steps without any gradient, and of which ranks, out of so many.

    `made` is the norm of gradients that there were before the optimizer stepped; NaN for none.
    """

    samples: int
    ranks: tuple[int, ...]
    world: int
    made: float

    @property
    def all(self) -> bool:
        """Whether no rank has a gradient."""
        return len(self.ranks) == self.world


@dataclass(slots=True)
class WithoutGradients(Condition[Gone]):
    """Follows whether the optimizers have anything to step with.

    Where `p.grad` is None an optimizer leaves a parameter alone and says nothing: parameters stand
    still, and no norm of a gradient is there that could be too small. Copies of one model lose
    their gradients together; a stage of a pipeline, or a shard, loses its own alone.

    Attributes:
        ranks: sampled steps of each at which it had some (`with`), and in a row, at which it had
            none (`without`), since `begin`.
    """

    ranks: ByRank = field(default_factory=lambda: ByRank({"with": 0, "without": 0, "begin": 0}))
    some_steps: SomeSteps = field(default_factory=SomeSteps)
    made: GradientsMade = field(default_factory=GradientsMade)
    watch: Watch[Gone] = field(default_factory=lambda: Watch(clear_after=_IN_A_ROW))

    def take(self, window: Window, frozen: Collection[int] = (), since: int = 0) -> None:
        """Goes through the steps at which it was seen how far the parameters moved.

        Args:
            frozen: ranks none of whose parameters asks for a gradient any more, `since` that step.
        """
        updates, norms = window.series.get(_UPDATE), window.series.get(_NORM)
        turns = [event.step for event in window.events if event.kind == TURNS]
        self.some_steps.turns_at = min([self.some_steps.turns_at, *turns])
        if updates is None:
            return
        self.made.take(window)
        known = self.ranks
        rows = known.rows(window.ranks)
        unasked = np.isin(known.ranks, list(frozen))
        for column in np.flatnonzero(updates.present.any(axis=0)).tolist():
            step = int(window.steps[column])
            normed = norms.present[:, column] if norms is not None else np.zeros(len(rows), bool)
            sampled = updates.present[:, column]
            moved = updates.values[:, column]
            still = sampled & ~normed & ~(np.isfinite(moved) & (moved != 0))
            known["with"][rows[normed]] += 1
            known["without"][rows[(normed | sampled) & ~still]] = 0
            known["begin"][rows[still & (known["without"][rows] == 0)]] = step
            known["without"][rows[still]] += 1
            known.sampled[rows[sampled]] = step
            there = known.there(step)
            if sampled.sum() == there.sum():
                had = bool(known["with"].max(initial=0) >= _BEFORE)
                self.some_steps.take(step, without=bool(still.sum() == there.sum()), had=had)
            gone = there & (~unasked | (step < since))
            gone &= (known["without"] >= _IN_A_ROW) & (known["with"] >= _BEFORE)
            # Samples every so many steps may all fall on those without.
            if gone.any() and self.some_steps.watch.open(step) is None:
                who = tuple(known.ranks[gone].tolist())
                samples = int(known["without"][gone].max())
                facts = Gone(samples, who, int(there.sum()), self.made.norm)
                begin = int(known["begin"][gone].min())
                self.watch.bad(step, facts, first_step=begin).facts = facts
            else:
                self.watch.good(step)

    def findings(self, window: Window) -> list[Finding]:
        """Those of a window, of all steps and of some."""
        return Condition.findings(self, window) + self.some_steps.findings(window)

    def finding(self, episode: Episode[Gone]) -> Finding:
        """What is reported of an episode."""
        facts, step = episode.facts, episode.first_step
        who = ranks(facts.ranks)
        of = "" if facts.all else f" of {who}"
        return episode.finding(
            kind="update.missing",
            key="without gradients",
            severity="critical",
            title=f"No parameter{of} has had a gradient since step {step}: the optimizer steps in "
            "vain",
            ranks=() if facts.all else facts.ranks,
            stage="reduced_gradient",
            cause=sentences(
                f"At {count(facts.samples, 'sampled step')} in a row no parameter"
                f"{if_several(facts.world, 'of any rank') if facts.all else of} had a gradient "
                "when the optimizer stepped, and none was moved, though losses were computed.",
                f"Backward passes make some all the same (of norm {number(facts.made)}): what is "
                "between them and the step takes them away, such as a `zero_grad` in that place."
                if facts.all and math.isfinite(facts.made)
                else "Gradients were kept elsewhere (FSDP that is told not to reduce keeps partial "
                "sums of its own and sets no `grad`; `no_sync` that was never left), were set to "
                "None before the step, or `backward` is not called any more."
                if facts.all
                else f"The other ranks train on. What {who} {agree(len(facts.ranks), 'holds')} (a "
                "stage of a pipeline, a shard, experts) does not call `backward` any more with "
                "what it receives, has set its gradients to None before the step, or is cut off "
                "from the loss (`detach`, `no_grad`).",
            ),
            remedy=(
                f"Look at what changes at step {step}: `set_requires_gradient_sync` or "
                "`set_requires_all_reduce` that is not set back, the order of `zero_grad`, "
                "`backward` and `step`, a loss under `no_grad`. Check that some "
                "`p.grad is not None` right before the step."
            ),
            evidence={"observed": facts.samples},
        )
