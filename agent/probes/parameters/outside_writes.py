"""Parameters that something else than the optimizer writes, reported at every step."""

from __future__ import annotations

import torch

from rankscope.agent.probes.base import Context, Probe, StepFacts

# Rounds that are sampled densely at first, one after the other.
_FIRST_ROUNDS = 8
# Of later ones one is sampled densely in this many times the interval of the rarest tier.
_RARER = 4


class OutsideWrites(Probe):
    """`parameters_written`: 1 at steps before which something else has written parameters.

    Costs two readings of a counter a step (tier `basic`), where the step before or after is
    sampled, too.

    Torch counts how often a tensor is written in place. The first trainable parameter stands for
    all of them: averages of whole models, weights that are swapped in, pulls from a server; where
    the user has declared of which each rank trains a copy of its own, the first of these. What is
    written cannot be seen so, only that it is; nothing is posted at all other steps, nor at the
    first one after a step that was not sampled. With such a record of every step it is known which
    rank missed an average that was made good at the next one, between two samples.

    Where writes come at one interval (ranks that average their parameters now and then), both steps
    around the next ones are sampled densely, eight times at first and then at one round in four
    times the interval of the rarest tier: whether an average has made the ranks equal is seen
    before the step after it and never again, and steps divisible by a power of two may all lie
    between two averages. Ranks that see the same writes sample the same steps.
    """

    name = "written"
    in_pairs = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._of: torch.Tensor | None = None
        self._version = 0
        self._step = -2
        self._rounds = _Rounds()

    def before_step(self, facts: StepFacts) -> None:
        """Whether the counter has moved since the end of the step before."""
        of, rounds = self._of, self._rounds
        if of is None or self._step != facts.step - 1:
            return
        written = of._version != self._version
        if written:
            facts.scalars["parameters_written"] = 1.0
        if written or facts.step == rounds.next_sampled:
            schedule = self.context.schedule
            rarest = _RARER << max(schedule.exponents.values())
            following = rounds.following(facts.step, written=written, rarest=rarest)
            if following >= 0:
                schedule.ask_dense(following, following - 1)

    def after_step(self, facts: StepFacts) -> None:
        """Where the optimizer has left the counter."""
        group = self.context.parameters
        self._of = of = group.tensors[group.foremost] if group.tensors else None
        if of is not None:
            self._version, self._step = of._version, facts.step


class _Rounds:
    """Steps before which parameters are written at one interval.

    Attributes:
        next_sampled: the next one that is sampled densely; -1 for none.
    """

    def __init__(self) -> None:
        self.next_sampled = -1
        self._last: int | None = None
        self._period = 0
        self._sampled_rounds = 0

    def following(self, step: int, *, written: bool, rarest: int) -> int:
        """The next round to sample, where two intervals in a row are the same; else -1.

        Args:
            written: whether parameters were written before this step, or it was only sampled for
                that.
            rarest: of later rounds one in this number is sampled.
        """
        if not written:
            # They have averaged for the last time, or do so at other intervals from now on.
            self._period, self.next_sampled = 0, -1
            return -1
        since = 0 if self._last is None else step - self._last
        self._last = step
        if self._period == 0 or since % self._period:
            self._period, self.next_sampled = since, -1
            return -1
        if step < self.next_sampled:
            return -1
        # Counted over the whole run: intervals that change do not make all of it dense.
        self._sampled_rounds += 1
        ahead = (
            1 if self._sampled_rounds <= _FIRST_ROUNDS else rarest - (step // self._period) % rarest
        )
        self.next_sampled = step + ahead * self._period
        return self.next_sampled
