"""What steps have cost, charged to the tiers that caused it."""

from __future__ import annotations

from rankscope.agent.probes import Context, StepFacts

# What cannot be measured without costing more, in seconds: the optimizer's hooks at every step,
# and the root hook and the loss probe inside the trainer's calls where a step is watched; with
# what the caches hold after a training step, not after another call of the same.
_UNSEEN = 8e-6
_UNSEEN_BASIC = 200e-6


class Account:
    """Of the steps of one monitor.

    Args:
        context: has the schedule, which is given the costs and the times of steps, and says which
            tiers are due.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ended: tuple[int, float] | None = None  # the last watched step, and when
        self._put_off: tuple[StepFacts, float, float] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the cost of a step has been put off."""
        return self._put_off is not None

    def put_off(self, facts: StepFacts, began: float, spent: float) -> None:
        """As `charge`, at the end of a later step: with `settle`."""
        self._put_off = facts, began, spent

    def settle(self) -> int | None:
        """Charges what was put off; its step."""
        put_off, self._put_off = self._put_off, None
        if put_off is None:
            return None
        facts, began, spent = put_off
        self.charge(facts, began, spent, late=True)
        return facts.step

    def leave_out(self, seconds: float) -> None:
        """Between the last step and the next one, time has passed that belongs to neither."""
        if self._ended is not None:
            step, when = self._ended
            self._ended = step, when + seconds
        if self._put_off is not None:
            facts, began, spent = self._put_off
            self._put_off = facts, began + seconds, spent

    def charge(self, facts: StepFacts, began: float, spent: float, *, late: bool = False) -> None:
        """Notes the cost of a step.

        Args:
            facts: of the step; have what single tiers were charged.
            began: when the agent began with its end, in seconds of the performance counter.
            spent: seconds of it all.
            late: whether the context is that of a later step.
        """
        tiers, context, ended = facts.tiers, self._context, self._ended
        schedule = context.schedule
        if (
            ended is not None
            and not tiers
            and (late or context.basic)
            and not schedule.wants(facts.step, began - ended[1])
        ):
            return
        # By a clock of its own: evaluations are in it, now and then, and medians are taken.
        self._ended = facts.step, began
        if ended is not None:
            tiers["basic"] = _UNSEEN_BASIC + max(spent - sum(tiers.values()), 0.0)
            schedule.note(
                facts.step,
                step_seconds=(began - ended[1]) / (facts.step - ended[0]),
                since=began - ended[1],
                base=_UNSEEN,
                tiers=tiers,
                again=[tier for tier in tiers if not (late or getattr(context, tier))],
            )
