"""Parameters: what every replica must hold bit for bit, before and after each step."""

from __future__ import annotations

import torch

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.model_facts import held
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.wire import Print


class Parameters(Probe):
    """Words and fingerprints of the trainable parameters.

    After each due step the word of the whole model (tier `word`: one pass over the parameters), at
    sampled steps digests and sketches tensor by tensor (tier `full`: two passes). Before a due step
    the word is taken again: parameters that changed since the step before were written by something
    else than the optimizer. That change is posted as a word of its own, 0 where there was none, so
    that ranks which all changed in the same way still agree.
    """

    name = "parameters"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._plan: FingerprintPlan | None = None
        self._word: int | None = None
        self._word_step = -1

    def start(self, facts: StepFacts) -> None:
        """What the parameters are at attach."""
        plan = self._planned()
        prints = plan.compute(self._held(), sketches=True)
        self._word, self._word_step = plan.word(prints.digests), facts.step - 1
        facts.words["start"] = self._word
        facts.prints.append(
            Print(
                step=facts.step,
                stage="start",
                table="parameters",
                digests=prints.digests,
                sketches=prints.sketches,
            )
        )

    def before_step(self, facts: StepFacts) -> None:
        """Whether the parameters are still those that the step before left."""
        if self._word_step != facts.step - 1 or self._word is None:
            return
        if self.context.due("word"):
            with facts.charged("word"):
                plan = self._planned()
                now = plan.word(plan.compute(self._held(), sketches=False).digests)
                facts.words["outside_optimizer"] = (now - self._word) % 2**64

    def after_step(self, facts: StepFacts) -> None:
        """What the step left."""
        full = self.context.due("full")
        if not (full or self.context.due("word")):
            return
        with facts.charged("full" if full else "word"):
            plan = self._planned()
            prints = plan.compute(self._held(), sketches=full)
            self._word, self._word_step = plan.word(prints.digests), facts.step
            facts.words["parameters"] = self._word
            if full:
                facts.prints.append(
                    Print(
                        step=facts.step,
                        stage="parameters",
                        table="parameters",
                        digests=prints.digests,
                        sketches=prints.sketches,
                    )
                )

    def _planned(self) -> FingerprintPlan:
        tensors = self._held()
        if self._plan is None or not self._plan.fits(tensors):
            self._plan = FingerprintPlan(self.context.names, tensors)
        return self._plan

    def _held(self) -> list[torch.Tensor]:
        return [held(p) for p in self.context.parameters]
