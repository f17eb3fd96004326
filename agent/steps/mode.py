"""How closely the step in progress is followed: decided once, when the step before has ended."""

from __future__ import annotations

import enum

from rankscope.agent.probes import Context, StepFacts


class Mode(enum.Enum):
    """How closely a step is followed.

    COUNTED: nothing is due. The hooks before optimizer steps and that of the root module are off.
    LIGHTWEIGHT: losses and rates are due, and nothing is due at the steps on either side. Most
        watched steps are such where steps are short, and they must cost as little as possible: the
        hooks before optimizer steps are off, and what can wait is done at the end of a later step.
    WATCHED: losses and rates are due. All hooks are on.
    SAMPLED: tensors are read, too.
    """

    COUNTED = enum.auto()
    LIGHTWEIGHT = enum.auto()
    WATCHED = enum.auto()
    SAMPLED = enum.auto()


# As globals: members of an enumeration are asked for by name through its class, which costs three
# times as much on the way of every step.
COUNTED, LIGHTWEIGHT, WATCHED, SAMPLED = Mode.COUNTED, Mode.LIGHTWEIGHT, Mode.WATCHED, Mode.SAMPLED


class StepMachine:
    """The mode of the step in progress, and what was found of it.

    Each end of a step (`next`) leads to one of four states, by the tiers that the schedule has due
    at the new step, at the one before and at the one after:

                          +--------------------------------+
                          v                                |
        attach ------> SAMPLED <-------> WATCHED <-----> COUNTED <----> LIGHTWEIGHT
                       |     ^           |     ^           |    close
                       +-----+           +-----+           +----------> (COUNTED for good)

    - SAMPLED where a tier beyond `basic` is due, or `word` was at the step before: what was
      fingerprinted is read once more, before the optimizer of the next step moves it.
    - LIGHTWEIGHT where `basic` alone is due, neither neighbour is followed, and the hooks before
      optimizer steps are not needed to know whose steps are the run's. So it follows COUNTED, and
      COUNTED follows it.
    - WATCHED where `basic` alone is due otherwise.
    - COUNTED where nothing is.

    Within a step nothing changes the mode. The number of the step is `StepCount`'s alone.

    Attributes:
        mode: of the step in progress.
        facts: found of it; those of an earlier step where nothing is due.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_closed = False
        self.mode = SAMPLED
        self.facts = StepFacts(context.step, context.under_way)

    def next(self, *, with_beginnings: bool) -> Mode:
        """A step has ended and has been counted: the mode of the one that is in progress now.

        Args:
            with_beginnings: whether the hooks before optimizer steps are needed.
        """
        context = self._context
        if self._is_closed:
            return COUNTED
        again = context.word
        before = self.mode
        context.enter()
        if again or context.signals or context.state:
            mode = SAMPLED
        else:
            mode = WATCHED if context.basic else COUNTED
        if mode is not COUNTED:
            step = context.step
            self.facts = StepFacts(step, context.under_way)
            after = context.word or context.schedule.next_due(step) == step + 1
            context.alone = before is COUNTED and not after
            if mode is WATCHED and context.alone and not with_beginnings:
                mode = LIGHTWEIGHT
        self.mode = mode
        return mode

    def close(self) -> None:
        """No step is followed any more."""
        self._is_closed = True
        self.mode = COUNTED
