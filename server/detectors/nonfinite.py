"""Values beside the training loss and the gradients that are not finite: evaluations, buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.statistics import rank_rows
from rankscope.server.detectors.wording import agree, count, listing, ranks, sentences
from rankscope.server.window import Check, Window, is_wanted

# Series that are losses, or were measured in an evaluation. A star stands for any characters.
LOSS_LIKE = ("eval/*", "*loss*", "*Loss*")
# The training loss has a detector of its own; the scale of a loss is none.
_NOT_MEANT = ("loss", "*scale*")
BUFFERS = "buffers_nonfinite"
_EVENT = "buffers.nonfinite"
_MAX_NAMES = 20


@dataclass(slots=True)
class Values:
    """What was seen.

    Attributes:
        ranks: whose value was not finite when it began.
        value: `NaN` or `infinite`.
        names: of series or buffers, those of the first step first.
        more: how many there are in all.
    """

    ranks: tuple[int, ...]
    value: str
    names: tuple[str, ...] = ()
    more: int = 0


@dataclass(slots=True)
class ValuesState:
    """What is remembered.

    Attributes:
        steps: seen so far.
        judged: values examined.
        bad: series whose newest values are not finite, or ranks whose buffers are not.
        reported: rank -> names of buffers.
    """

    judged: int = 0
    bad: set[str | int] = field(default_factory=set)
    reported: dict[int, tuple[str, ...]] = field(default_factory=dict)
    watch: Watch[Values] = field(default_factory=lambda: Watch(clear_after=0))


class EvaluationNonFinite(Detector[ValuesState]):
    """A loss of an evaluation, or another logged loss, is NaN or infinite.

    Statistic:
        None: one value is enough. It lasts until each of these series is finite again.

    Severity:
        Critical for an evaluation, warning for a series that the trainer logs.

    Evidence:
        `value` (the first one), `series`.

    Source:
        What decides which checkpoint is kept is no number; comparisons with NaN are all false.
    """

    kinds = ("eval.nonfinite",)
    lasting = "each evaluation is reported as a whole"
    wants = LOSS_LIKE

    def advance(self, window: Window, state: ValuesState) -> Outcome:
        """Looks at every value of every such series, step by step."""
        meant = [
            name
            for name in sorted(window.series)
            if is_wanted(name, LOSS_LIKE) and not is_wanted(name, _NOT_MEANT)
        ]
        for column, step in enumerate(window.steps.tolist()):
            seen, found, suspects, value = False, [], set(), ""
            for name in meant:
                there = window.series[name].present[:, column]
                if not there.any():
                    continue
                seen = True
                state.judged += int(there.sum())
                values = window.series[name].values[:, column]
                bad = there & ~np.isfinite(values)
                if bad.any():
                    found.append(name)
                    suspects |= set(window.ranks[bad].tolist())
                    value = value or ("NaN" if np.isnan(values[bad]).any() else "infinite")
                    state.bad.add(name)
                else:
                    state.bad.discard(name)
            if found:
                facts = Values(tuple(sorted(suspects)), value, tuple(found))
                known = state.watch.bad(step, facts).facts
                known.names = tuple(dict.fromkeys((*known.names, *found)))[:_MAX_NAMES]
            elif seen and not state.bad:
                state.watch.good(step)
        findings = tuple(_evaluation(e, window) for e in state.watch.take(window.last_step))
        return Outcome({"eval.nonfinite": self._check(state)}, findings)

    def _check(self, state: ValuesState) -> Check:
        if not state.judged:
            return Check.missing("No evaluation's loss and no further loss has been posted.")
        judged = count(state.judged, "value")
        return Check.ok(f"The last of {judged} of evaluations and other losses was finite.")


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
                state.reported[event.rank] = names[:_MAX_NAMES]
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


def _evaluation(episode: Episode[Values], window: Window) -> Finding:
    facts, step = episode.facts, episode.first_step
    evaluated = any(name.startswith("eval/") for name in facts.names)
    where = "" if len(facts.ranks) == window.world_size else f" on {ranks(facts.ranks)}"
    more = f" and {len(facts.names) - 1} more" if len(facts.names) > 1 else ""
    return episode.finding(
        kind="eval.nonfinite",
        severity="critical" if evaluated else "warning",
        title=f"`{facts.names[0]}`{more} is {facts.value} since step {step}{where}"[:118],
        ranks=facts.ranks,
        cause=sentences(
            f"At step {step} {listing([f'`{n}`' for n in facts.names], most=4)} was {facts.value}"
            f"{where}.",
            "If the training loss is finite, it comes from what only the evaluation uses: running "
            "statistics of batch norm that are not finite, averaged weights, a NaN in its data, or "
            "a mean over no samples."
            if evaluated
            else "The trainer computed it so: a mean over nothing, a NaN among its values, or "
            "an overflow.",
        ),
        remedy=(
            "Look for values that are not finite in the model's buffers and in the evaluation's "
            "data; do not choose a checkpoint by this number: comparisons with NaN are false."
        ),
        evidence={"value": facts.value, "series": list(facts.names)},
    )


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
