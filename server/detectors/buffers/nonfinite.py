"""Buffers of the model that are not finite."""

from __future__ import annotations

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.nonfinite_values import MAX_NAMES, Values, ValuesState
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, ranks, sentences
from rankscope.server.window import Check, Window

BUFFERS = "buffers_nonfinite"
_EVENT = "buffers.nonfinite"


class BuffersNonFinite(Detector[ValuesState]):
    """A buffer of the model, a running mean or variance above all, holds NaN or infinities.

    In training mode batch norm does not use its running statistics, so that the loss stays finite;
    each evaluation and each checkpoint is spoilt.

    Statistic:
        None: the number of such buffers, at every step at which buffers are sampled. It lasts until
        no rank has one.

    Severity:
        Critical.

    Evidence:
        `buffers` (names, by rank).

    Source:
        Statistics are averages over the batches so far: one NaN in them stays.
    """

    kinds = ("buffers.nonfinite",)
    lasting = "what is not finite stays in a buffer"
    wants = (BUFFERS,)

    def advance(self, window: Window, state: ValuesState) -> Outcome:
        """Takes the counts, and the names that ranks reported."""
        for event in window.events:
            if event.kind == _EVENT:
                names = tuple(str(n) for n in event.data.get("tensors", ()))
                state.reported[event.rank] = names[:MAX_NAMES]
        steps, rows = rank_rows(window, BUFFERS)
        for step, row in zip(steps.tolist(), rows, strict=True):
            posted = ~np.isnan(row)
            state.judged += int(posted.sum())
            bad = posted & (row > 0)
            state.bad -= set(window.ranks[posted & ~bad].tolist())
            if bad.any():
                who = window.ranks[bad].tolist()
                state.bad |= set(who)
                facts = Values(tuple(who), "not finite", more=int(row[bad].max()))
                known = state.watch.bad(step, facts).facts
                known.ranks = tuple(sorted({*known.ranks, *who}))
                known.more = max(known.more, facts.more)
            elif not state.bad:
                state.watch.good(step)
        findings = tuple(_buffers(e, state) for e in state.watch.take(window.last_step))
        return Outcome({"buffers.nonfinite": self._check(state)}, findings)

    def _check(self, state: ValuesState) -> Check:
        if not state.judged:
            return Check.missing(
                "No rank posts buffers; the model may have none.",
                early="No buffers have been sampled yet.",
            )
        return Check.ok(f"All buffers were finite at the last of {count(state.judged, 'sample')}.")


def _buffers(episode: Episode[Values], state: ValuesState) -> Finding:
    facts, step = episode.facts, episode.first_step
    names = tuple(dict.fromkeys(n for rank in facts.ranks for n in state.reported.get(rank, ())))
    first = f": {names[0]}" if names else ""
    since = (
        ""
        if episode.agreed_until is None
        else f" All were finite at step {episode.agreed_until}, where they were last sampled."
    )
    held = listing([f"`{n}`" for n in names], most=4)
    return episode.finding(
        kind="buffers.nonfinite",
        severity="critical",
        title=f"{count(facts.more, 'buffer')} on {ranks(facts.ranks)} "
        f"{agree(facts.more, 'is')} not finite since step {step}{first}"[:118],
        ranks=facts.ranks,
        tensors=names,
        cause=sentences(
            f"At step {step} {held or 'buffers'} held NaN or infinities.{since}",
            "Running statistics take in every batch that passes in training mode: one batch with "
            "such a value stays in them, also where the step itself was skipped. Training goes on, "
            "since it uses the statistics of each batch; evaluations and checkpoints are spoilt.",
        ),
        remedy=(
            "Look at the batches and activations before this step on these ranks, and skip a batch "
            "before it runs through the model. Restore the buffers from a checkpoint, or call "
            "`reset_running_stats()`."
        ),
        evidence={"buffers": {str(r): list(state.reported.get(r, ())) for r in facts.ranks}},
    )
