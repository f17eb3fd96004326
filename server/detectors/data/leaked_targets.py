"""Targets that lie among the inputs, place by place or as a column of a table."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import together
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.window import Window

ERROR, FIRST, COLUMN = "given_target_error", "given_target_first", "target_column"
EXPLAINED = "explained_deviance"

# Share of what the frequencies of the targets cost, in error, above which a model has not learned
# to copy: what it is given at a place costs it nothing there once it has.
_COPIES = 0.5
# Consecutive samples: means over so many are of some hundred sequences.
_RECENT = 16
# Samples without it after which it is over: as many as of targets one place on (`data.leaked`).
_CLEAR_AFTER = 8


@dataclass(slots=True)
class Copied:
    """What was seen: mean cross entropies over all places and at the first, in nats."""

    error: float
    first: float
    constant: float
    samples: int


@dataclass(slots=True)
class SamePlace(Condition[Copied]):
    """The class to be predicted at each place is what the model is given at that place.

    Attributes:
        recent: error, error at the first place, and share of the deviance explained.
        judged: samples of such targets so far, since `begin`.
    """

    recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    judged: int = 0
    begin: int = -1
    watch: Watch[Copied] = field(default_factory=lambda: Watch(clear_after=_CLEAR_AFTER))

    def take(self, window: Window) -> None:
        """Goes through the samples; those of all ranks have to show it."""
        steps, rows = rank_rows(window, ERROR)
        alike = {s for s, row in zip(steps.tolist(), rows, strict=True) if np.nanmin(row) >= 0}
        for step, row in together(window, ERROR, FIRST, EXPLAINED):
            if ERROR not in row:
                continue
            if step not in alike or not math.isfinite(row.get(EXPLAINED, math.nan)):
                self.recent.clear()
                self.watch.good(step)
                continue
            self.begin = step if self.begin < 0 else self.begin
            self.judged += 1
            self.recent.append((row[ERROR], row.get(FIRST, math.nan), row[EXPLAINED]))
            self._judge(step)

    def _judge(self, step: int) -> None:
        error, first, explained = np.mean(self.recent, axis=0).tolist()
        # The deviance of the best constant answer, of which the model has left `error`.
        constant = error / max(1 - explained, 1e-12)
        if len(self.recent) == _RECENT and max(error, first) <= _COPIES * constant:
            facts = Copied(error, first, constant, self.judged)
            # What the model is given does not change in a run; it learns by and by to use it.
            self.watch.bad(step, facts, first_step=self.begin).facts = facts
        else:
            self.watch.good(step)

    def finding(self, episode: Episode[Copied]) -> Finding:
        """What is reported of an episode."""
        facts = episode.facts
        return episode.finding(
            kind="data.leaked",
            key="same_place",
            severity="warning",
            title="The model is given, place by place, the tokens that it is to predict",
            cause=(
                "One of the model's inputs is the target itself, token by token, and the mean "
                f"cross entropy has come to {number(facts.error)} ({number(facts.first)} at the "
                f"first place), of {number(facts.constant)} that the frequencies of the tokens "
                "alone would cost: it copies. Targets that were not shifted against the inputs, a "
                "decoder that gets its own targets, or a masked language model whose tokens were "
                "not masked: the loss says nothing of how well anything is predicted."
            ),
            remedy=(
                "Of a language model, predict the next token: `model(tokens[:, :-1])` against "
                "`tokens[:, 1:]`. Give a decoder its targets one place on, after a token that "
                "begins the sequence. Mask what is to be predicted. Of an autoencoder, whose "
                "targets are its inputs on purpose, silence this alert."
            ),
            evidence={
                "error": facts.error,
                "first": facts.first,
                "constant": facts.constant,
                "samples": facts.samples,
            },
        )


@dataclass(slots=True)
class TargetColumn(Condition[int]):
    """A column of the inputs is the target.

    Attributes:
        column: of the newest samples, which are `in_a_row`; `judged`: all there were.
    """

    column: int = -1
    in_a_row: int = 0
    begin: int = -1
    judged: int = 0
    watch: Watch[int] = field(default_factory=lambda: Watch(clear_after=_CLEAR_AFTER))

    def take(self, window: Window) -> None:
        """Goes through the samples; all ranks have to show the same column."""
        steps, rows = rank_rows(window, COLUMN)
        for step, row in zip(steps.tolist(), rows, strict=True):
            known = row[np.isfinite(row)]
            self.judged += 1
            if not len(known) or known.min() < 0 or known.min() != known.max():
                self.in_a_row = 0
                self.watch.good(step)
                continue
            column = int(known[0])
            if column != self.column or not self.in_a_row:
                self.column, self.in_a_row, self.begin = column, 0, step
            self.in_a_row += 1
            if self.in_a_row >= _RECENT:
                self.watch.bad(step, column, first_step=self.begin).facts = column

    def finding(self, episode: Episode[int]) -> Finding:
        """What is reported of an episode."""
        column = episode.facts
        return episode.finding(
            kind="data.leaked",
            key="column",
            severity="warning",
            title=f"Column {column} of the inputs is the target",
            cause=(
                f"Column {column} (counted from 0) of the table or the sequences that the model is "
                "given is, up to a factor and an offset, what it is to predict, or the first of "
                "several targets that are all among the columns: their correlation was 1 at "
                f"{count(episode.seen + _RECENT - 1, 'sample')}. The model needs to copy that and "
                "nothing else, and is of no use where the answer is not known."
            ),
            remedy=(
                f"Take column {column} out of the inputs, and look for others that are made of "
                "the target or were recorded after it: a window that reaches into what is to be "
                "forecast."
            ),
            evidence={"column": column, "observed": episode.seen},
        )
