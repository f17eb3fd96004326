"""The optimizer's state is gone, or an older one, in the midst of a training."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.desync.resets import Reset, Resets
from rankscope.server.detectors.effects import Rule
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import if_several, ranks
from rankscope.server.window import Check, Window

# Ranks sample their states at intervals of their own: what they report within this many steps is
# one event. 16 steps are sampled after each report.
_TOGETHER = 16
# A moment of Adam forgets within some 1 / (1 - beta) steps: 10 and 1,000 by default. The first of
# them has the updates of its own size back after this many.
_CLEAR = 32


@dataclass(slots=True)
class ResetState:
    """What is remembered: steps so far, and what the ranks report."""

    last_step: int = -1
    resets: Resets = field(default_factory=Resets)


class UpdateReset(Detector[ResetState]):
    """The optimizer's state was cleared, replaced by an older one or overwritten between two steps.

    The optimizer was built anew (after layers were unfrozen, at a change of phase) without its
    state, or a checkpoint of before was loaded into it: moments and step counters begin again, and
    the first updates are of another size than those before. On some ranks only it is
    `desync.optimizer`, where ranks hold replicas.

    Statistic:
        What a rank sees of the state of one parameter: it is gone, its step counter has gone back,
        or it was written in place since the last step; and it was as it should be before the 8
        steps before. Reports of several ranks within 16 steps are one event. And (key `again`) at 8
        further steps without 8 of the other sort between them, or where at each of 8 steps another
        optimizer without a state stepped in place of the one before.

    Severity:
        Info where all ranks report it: many trainings do so on purpose. Warning where some do and
        the others do not, of ranks that have no replica to be compared with (a sharded optimizer),
        where it comes again and again after a time without, and of new optimizers at each step.

    Evidence:
        `how` (`reset`, `set back`, `written in place`), `before` and `after` (steps that the state
        says it has taken), `steps` (by rank).

    Source:
        Each rank reads its own (`optimizer.state` events).
    """

    kinds = ("update.reset",)
    lasting = "a step counter that has gone back stays behind: the next sample finds it"
    effects = (
        Rule(
            root=("desync.",),
            consequence=("update.reset",),
            earliest=-_TOGETHER,
            latest=_TOGETHER,
            why="the ranks' states were changed differently",
        ),
    )

    def advance(self, window: Window, state: ResetState) -> Outcome:
        """Takes what the ranks report."""
        state.last_step = max(state.last_step, window.last_step)
        state.resets.take(window)
        everyone = {*window.ranks.tolist()}
        paired = {rank for members in window.classes if len(members) > 1 for rank in members}
        findings = []
        again = [one for one in state.resets.known if one.again]
        if again:
            findings.append(_again_finding(again, state.resets.known, state.last_step))
        for group in _events([one for one in state.resets.known if not one.again]):
            who = {one.rank for one in group}
            whole = bool(everyone) and everyone <= who
            # Whether the others report it, too, is certain a little later.
            late = state.last_step >= group[0].step + _TOGETHER
            if whole or (late and paired.isdisjoint(who)):
                findings.append(_finding(group, whole=whole))
        why = "No rank has seen its optimizer's state change between two steps."
        if findings:
            why = f"The last such change was at step {findings[-1].first_step}."
        check = Check.ok(why, early="Too few steps to know the optimizer's state.")
        return Outcome({"update.reset": check}, tuple(findings))


def _events(known: list[Reset]) -> list[list[Reset]]:
    """Reports of one event each, in the order of their steps."""
    found: list[list[Reset]] = []
    for one in sorted(known, key=lambda r: (r.step, r.rank)):
        if found and one.step - found[-1][0].step < _TOGETHER:
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _again_finding(again: list[Reset], known: list[Reset], last_step: int) -> Finding:
    """Of a state that never gets old any more."""
    first = min(again, key=lambda one: (one.step, one.rank))
    whose = {one.rank for one in again}
    who = tuple(sorted(whose))
    # The report before the changes that are counted is of the first of them.
    before = [r.step for r in known if r.rank in whose and not r.again and r.step < first.step]
    renewed = first.renewed >= 0
    since = first.renewed if renewed else max(before, default=first.step)
    how = first.how
    seen = first.step
    return Incident(
        first_step=since, seen_step=seen, last_step=max(seen, last_step), clear_after=0
    ).finding(
        kind="update.reset",
        key="again",
        severity="warning",
        title=f"A new optimizer takes each step since step {since}"
        if renewed
        else f"The optimizer's state of {ranks(who)} is {how} again and again since step {since}",
        ranks=who,
        stage="optimizer_state",
        cause=(
            f"At each step since step {since} an optimizer has stepped on {ranks(who)} that had "
            "never stepped before, in place of the last one. "
            if renewed
            else f"Since step {since} the optimizer's state of {ranks(who)} has been {how} every "
            "few steps, and not before. "
        )
        + (
            "Moments never become means over several batches: each step "
            "follows its own batch, with the size of a first step (of Adam, the full learning "
            "rate for every parameter, however small its gradient)."
        ),
        remedy=(
            f"Look for what is done at nearly every step since step {since}: an optimizer that is "
            "built in the loop, `state.clear()`, a `load_state_dict` of one and the same file."
        ),
        evidence={"how": how, "again": max(one.again for one in again)},
    )


def _finding(group: list[Reset], *, whole: bool) -> Finding:
    first = group[0]
    who = tuple(sorted({one.rank for one in group}))
    counts = {"before": first.before, "after": first.after} if first.before is not None else {}
    text = str(first)
    return Incident.since(first.step, first.step, clear_after=_CLEAR).finding(
        kind="update.reset",
        key=f"step:{first.step}",
        severity="info" if whole else "warning",
        title=f"The optimizer's state of {ranks(who)} was {first.how} before step {first.step}",
        ranks=who,
        stage="optimizer_state",
        cause=(
            f"{text[:1].upper()}{text[1:]}. "
            + (
                f"{if_several(len(who), 'All ranks report it: the', before='') or 'The'} "
                "optimizer was built anew, an earlier state was loaded into it, or code changed "
                "it."
                if whole
                else "The other ranks do not report it: they went on with the state that they had."
            )
        ),
        remedy=(
            "Nothing, if this is meant. Else keep the optimizer where parameters change "
            "(`add_param_group`), and load states before the first step only."
            if whole
            else f"Look for code that builds the optimizer anew or loads its state on {ranks(who)} "
            "only; go back to a checkpoint from before that step."
        ),
        evidence={"how": first.how, **counts, "steps": {str(r.rank): r.step for r in group}},
    )
