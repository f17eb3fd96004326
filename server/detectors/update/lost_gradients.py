"""Steps of an optimizer none of whose parameters has a gradient any more. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, if_several
from rankscope.server.window import Window

_UPDATE, _NORM = "update_ratio", "grad_norm"
# Sampled steps with gradients, before, and without any, in a row: one or two may be steps whose
# gradients were taken away on purpose.
_BEFORE, _IN_A_ROW = 8, 8


@dataclass(slots=True)
class Gone:
    """What was seen: sampled steps without any gradient, of so many ranks."""

    samples: int
    world: int


@dataclass(slots=True)
class WithoutGradients(Condition[Gone]):
    """Follows whether the optimizer has anything to step with.

    Where `p.grad` is None an optimizer leaves a parameter alone and says nothing: parameters stand
    still, and no norm of a gradient is there that could be too small.

    Attributes:
        with_gradients: sampled steps that had some; `without`: in a row, that had none, since
            `begin`.
    """

    with_gradients: int = 0
    without: int = 0
    begin: int = -1
    watch: Watch[Gone] = field(default_factory=lambda: Watch(clear_after=_IN_A_ROW))

    def take(self, window: Window) -> None:
        """Goes through the steps at which it was seen how far the parameters moved."""
        normed = {int(step) for step in rank_rows(window, _NORM)[0]}
        for step, row in zip(*(a.tolist() for a in rank_rows(window, _UPDATE)), strict=True):
            moved = np.array(row)
            still = bool((moved[np.isfinite(moved)] == 0).all())
            if step in normed or not still:
                self.with_gradients += step in normed
                self.without = 0
                self.watch.good(step)
                continue
            self.begin = step if not self.without else self.begin
            self.without += 1
            if self.without >= _IN_A_ROW and self.with_gradients >= _BEFORE:
                facts = Gone(self.without, len(window.ranks))
                self.watch.bad(step, facts, first_step=self.begin).facts = facts

    def finding(self, episode: Episode[Gone]) -> Finding:
        """What is reported of an episode."""
        facts, step = episode.facts, episode.first_step
        return episode.finding(
            kind="update.missing",
            key="without gradients",
            severity="critical",
            title=f"No parameter has had a gradient since step {step}: the optimizer steps in vain",
            stage="reduced_gradient",
            cause=(
                f"At {count(facts.samples, 'sampled step')} in a row no parameter"
                f"{if_several(facts.world, 'of any rank')} had a gradient when the optimizer "
                "stepped, and none was moved, though losses were computed. Gradients were kept "
                "elsewhere (FSDP that is told not to reduce keeps partial sums of its own and sets "
                "no `grad`; `no_sync` that was never left), were set to None before the step, or "
                "`backward` is not called any more."
            ),
            remedy=(
                f"Look at what changes at step {step}: `set_requires_gradient_sync` or "
                "`set_requires_all_reduce` that is not set back, the order of `zero_grad`, "
                "`backward` and `step`, a loss under `no_grad`. Check that some "
                "`p.grad is not None` right before the step."
            ),
            evidence={"observed": facts.samples},
        )
