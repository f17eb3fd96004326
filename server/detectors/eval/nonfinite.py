"""Evaluations, and losses beside that of the training, that are not finite."""

from __future__ import annotations

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.nonfinite_values import MAX_NAMES, Values, ValuesState
from rankscope.server.detectors.mechanisms.wording import count, listing, ranks, sentences
from rankscope.server.window import Check, Window, is_wanted

# Series that are losses, or were measured in an evaluation. A star stands for any characters.
LOSS_LIKE = ("eval/*", "*loss*", "*Loss*")
# The training loss has a detector of its own; the scale of a loss is none.
_NOT_MEANT = ("loss", "*scale*")


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
                known.names = tuple(dict.fromkeys((*known.names, *found)))[:MAX_NAMES]
            elif seen and not state.bad:
                state.watch.good(step)
        findings = tuple(_evaluation(e, window) for e in state.watch.take(window.last_step))
        return Outcome({"eval.nonfinite": self._check(state)}, findings)

    def _check(self, state: ValuesState) -> Check:
        if not state.judged:
            return Check.missing("No evaluation's loss and no further loss has been posted.")
        judged = count(state.judged, "value")
        return Check.ok(f"The last of {judged} of evaluations and other losses was finite.")


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
