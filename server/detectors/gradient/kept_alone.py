"""Ranks that alone do not set their gradients to zero, always or once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.wording import agree, count, number, ranks
from rankscope.server.window import Float64, Int64

# Samples at which all ranks began with empty gradients, before one that does not is a fault: a loop
# that empties them at another place on purpose (a rank with a loss of its own) does so always.
_QUIET = 8


@dataclass(slots=True)
class Kept:
    """What was seen.

    Attributes:
        ranks: that began a step with gradients.
        norm: of these, the largest.
        samples: at which it was so.
    """

    ranks: tuple[int, ...]
    norm: float
    samples: int = 0


@dataclass(slots=True)
class KeptAlone(Condition[Kept]):
    """Follows what ranks have in their gradients when a step's own are added.

    Attributes:
        quiet: samples at which all ranks had nothing.
    """

    quiet: int = 0
    watch: Watch[Kept] = field(default_factory=lambda: Watch(clear_after=8))

    def observe(self, step: int, who: Int64, norms: Float64) -> None:
        """Takes what the ranks had at a step.

        Args:
            who: ranks, [R].
            norms: of what was there, [R]; NaN where that is not known.
        """
        known, kept = ~np.isnan(norms), norms > 0
        if np.count_nonzero(known) < 2:
            return
        if not kept.any():
            self.quiet += 1
        if not kept.any() or kept[known].all():
            self.watch.good(step)
        elif self.quiet >= _QUIET:
            odd = tuple(who[kept].tolist())
            facts = self.watch.bad(step, Kept(odd, 0.0)).facts
            facts.samples += 1
            facts.ranks = tuple(sorted({*facts.ranks, *odd}))
            facts.norm = max(facts.norm, float(norms[kept].max()))

    def finding(self, episode: Episode[Kept]) -> Finding:
        """What is reported of an episode."""
        return _finding(episode)


def _finding(episode: Episode[Kept]) -> Finding:
    kept, step = episode.facts, episode.first_step
    who, several = ranks(kept.ranks), len(kept.ranks)
    often = f"since step {step}" if kept.samples > 1 else f"at step {step}"
    return episode.finding(
        kind="gradient.accumulating",
        key="alone",
        severity="critical" if kept.samples > 1 else "warning",
        title=f"{who.capitalize()} {agree(several, 'adds')} to old gradients {often}",
        ranks=kept.ranks,
        stage="local_gradient",
        cause=(
            f"When the gradients of step {step} were added, {who} still had those of the step "
            f"before (norm {number(kept.norm)}) and the other ranks had none, as all of them had "
            f"at the checked steps before; seen at {count(kept.samples, 'sample')}. The reduction "
            "mixes a part of the old gradient into every rank's step."
        ),
        remedy=(
            f"Look for what keeps {who} from calling `optimizer.zero_grad()` after a step: a "
            "condition on the rank, the loss or the step, an exception that is swallowed."
        ),
        evidence={"norm": kept.norm, "observed": kept.samples},
    )
