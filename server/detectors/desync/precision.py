"""Ranks of one model that compute in another precision than the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import agree, count, ranks, sentences
from rankscope.server.window import Window

SERIES = "autocast"
# Consecutive samples before it is reported: a pass of its own (a warm-up, a probe of the memory) is
# over by then.
_SAMPLES = 4
_FORMATS = {0: "without autocast", 8: "bfloat16", 11: "float16"}


@dataclass(slots=True)
class Unlike:
    """What was seen.

    Attributes:
        ranks: the suspect ones: all where no precision is that of most.
        bits: rank -> bits of the significand, 0 for no autocast.
        decided: whether most ranks have one.
    """

    ranks: tuple[int, ...]
    bits: dict[int, int]
    decided: bool


@dataclass(slots=True)
class Precisions(Condition[Unlike]):
    """Follows the precision of the ranks' forward passes."""

    count: int = 0
    since: int = 0
    watch: Watch[Unlike] = field(default_factory=lambda: Watch(clear_after=8))

    def take(self, window: Window) -> list[Finding]:
        """Goes through a window; its findings."""
        steps, rows = rank_rows(window, SERIES)
        # Stages of a pipeline may compute as they like.
        members = max(window.replicas, key=len)
        for step, row in zip(steps.tolist(), rows.tolist(), strict=True):
            held = {
                int(rank): int(value)
                for rank, value in zip(window.ranks, row, strict=True)
                if int(rank) in members and value == value
            }
            if len(held) < 2:
                continue
            if len(set(held.values())) == 1:
                self.count = 0
                self.watch.good(step)
                continue
            self.since = self.since if self.count else step
            self.count += 1
            if self.count >= _SAMPLES:
                self.watch.bad(step, _unlike(held), first_step=self.since)
        return self.findings(window)

    def finding(self, episode: Episode[Unlike]) -> Finding:
        """What is reported of an episode."""
        return _finding(episode)


def _unlike(held: dict[int, int]) -> Unlike:
    ordered = Counter(held.values()).most_common()
    decided = len(held) > 2 and ordered[0][1] > ordered[1][1]
    suspects = [r for r, bits in held.items() if not decided or bits != ordered[0][0]]
    return Unlike(tuple(sorted(suspects)), held, decided)


def _finding(episode: Episode[Unlike]) -> Finding:
    facts, step = episode.facts, episode.first_step
    who = ranks(facts.ranks)
    by_bits: dict[int, list[int]] = {}
    for rank, bits in sorted(facts.bits.items()):
        by_bits.setdefault(bits, []).append(rank)
    listed = "; ".join(
        f"{_FORMATS.get(bits, f'{bits} bits')} on {ranks(tuple(held))}"
        for bits, held in sorted(by_bits.items())
    )
    verb = agree(len(facts.ranks), "computes")
    what = (
        f"{verb} in another precision than the other ranks"
        if facts.decided
        else f"{verb} in different precisions"
    )
    return episode.finding(
        kind="desync.config",
        key="precision",
        severity="warning",
        title=f"{who.capitalize()} {what} since step {step}",
        ranks=facts.ranks,
        stage="local_gradient",
        cause=sentences(
            f"Since step {step} the forward passes are computed in different precisions: {listed} "
            f"({count(episode.seen + _SAMPLES - 1, 'checked step')}). The reduction mixes the "
            "rounding of some ranks into the gradient of all, so that nothing else shows it.",
            "" if facts.decided else "No precision is that of most ranks.",
        ),
        remedy=(
            "Look at what switches `torch.autocast` on: a condition on the rank, the device or an "
            "environment variable that is not the same everywhere."
        ),
        evidence={"bits": {str(rank): bits for rank, bits in sorted(facts.bits.items())}},
    )
