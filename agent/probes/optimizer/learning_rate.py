"""What the optimizer was configured with: the learning rate of each parameter group."""

from __future__ import annotations

from typing import Any

from rankscope.agent.probes.base import Probe, StepFacts


class LearningRate(Probe):
    """`lr`, and `lr/<group>` where the groups differ; costs a dictionary look-up a group."""

    name = "optimizer"

    def after_step(self, facts: StepFacts) -> None:
        """Reads the rates that this step has applied: a scheduler may change them right after."""
        groups = self.context.optimizer.param_groups
        rate = groups[0].get("lr")
        if rate is not None:
            facts.scalars["lr"] = rate
        if len(groups) == 1:
            return
        rates = [group["lr"] for group in groups if "lr" in group]
        # A rate held in a tensor (capturable optimizers) may be on the device: not compared here.
        if any(r is not rates[0] and r != rates[0] for r in rates if _plain(r)):
            for index, rate in enumerate(rates):
                facts.scalars[f"lr/{index}"] = rate


def _plain(rate: Any) -> bool:
    return isinstance(rate, int | float)
