"""Tensors of which a rank does not take the average that the others hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, ranks
from rankscope.server.window import Window

# Rounds without it after which it is over, at the interval of the last two.
_CLEAR = 4


@dataclass(slots=True)
class NotTaken:
    """What was seen.

    Attributes:
        ranks: that hold other values.
        tensors: those, in the order in which they were seen.
        rounds: at which it was so.
    """

    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    rounds: int = 0


@dataclass(slots=True)
class NotTakenAverages(Condition[NotTaken]):
    """Follows the averages of the parameters."""

    last: int = -1
    watch: Watch[NotTaken] = field(default_factory=Watch)

    def take(self, window: Window) -> list[Finding]:
        """Goes through those of a window; findings of it."""
        for made in window.averages:
            if self.last >= 0 and made.step > self.last:
                self.watch.clear_after = _CLEAR * (made.step - self.last)
            self.last = made.step
            if not made.apart:
                self.watch.good(made.step)
                continue
            who = tuple(sorted({rank for _, odd in made.apart for rank in odd}))
            facts = NotTaken(who, tuple(name for name, _ in made.apart))
            episode = self.watch.bad(made.step, facts)
            known = episode.facts
            known.rounds += 1
            known.ranks = tuple(sorted({*known.ranks, *who}))
            known.tensors = tuple(dict.fromkeys((*known.tensors, *facts.tensors)))
        return self.findings(window)

    def finding(self, episode: Episode[NotTaken]) -> Finding:
        """What is reported of an episode."""
        return _finding(episode)


def _finding(episode: Episode[NotTaken]) -> Finding:
    facts, step = episode.facts, episode.first_step
    who, several = ranks(facts.ranks), len(facts.ranks)
    these = count(len(facts.tensors), "tensor")
    return episode.finding(
        kind="desync.parameters",
        key="not taken",
        severity="warning",
        title=f"{who.capitalize()} {agree(several, 'does')} not take the average of {these} since "
        f"step {step}",
        ranks=facts.ranks,
        tensors=facts.tensors,
        stage="outside_optimizer",
        cause=(
            f"Before step {step} the ranks averaged their parameters: after it all of them held "
            f"the same in the other tensors, and most of them in {listing(facts.tensors, most=6)}; "
            f"{who} {agree(several, 'holds')} something else there. Seen at "
            f"{count(facts.rounds, 'average')}. What {who} {agree(several, 'gives')} into the next "
            "average is then what it alone has learned."
        ),
        remedy=(
            f"Look at the loop that writes the average back on {who}: a condition that leaves out "
            "a name or a tensor, a copy that is averaged in place of the parameter, a parameter "
            "that was made anew. Broadcast these tensors once from a rank that holds the average."
        ),
        evidence={"rounds": facts.rounds},
    )
