"""Further modules that must agree between the ranks: averages of the weights, teachers, targets."""

from __future__ import annotations

import torch

from rankscope.agent.model.facts import plain_name
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, StepFacts


class WatchedModules(Probe):
    """Fingerprints of the modules given to `monitor.watch`; one pass over them (tier `state`)."""

    name = "watched"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._groups: dict[str, tuple[TensorGroup, ...]] = {}

    def add(self, name: str, module: torch.nn.Module) -> None:
        """Watches a module from now on; a name that is taken is given to the new one."""
        made = []
        # Buffers separately: statistics of batch norm may be each rank's own.
        for table, held in (
            (f"watched/{name}", dict(module.named_parameters())),
            (f"watched/{name}/buffers", dict(module.named_buffers())),
        ):
            if held:
                names = [f"{name}.{plain_name(n)}" for n in held]
                made.append(TensorGroup(table, names, list(held.values())))
        self._groups[name] = tuple(made)
        for group in made:
            self.context.announce(group)

    def after_step(self, facts: StepFacts) -> None:
        """What the modules hold after the step."""
        if not (self._groups and self.context.state):
            return
        with facts.charged("state"):
            for groups in self._groups.values():
                for group in groups:
                    self._take(facts, group)

    def _take(self, facts: StepFacts, group: TensorGroup) -> None:
        tensors = group.held()
        plan = group.plan(tensors)
        pending = plan.begin(tensors, sketches=True)

        def deliver() -> None:
            fingerprints = pending.result()
            digest = facts.digests.get("watched", 0) + plan.model_digest(fingerprints.digests)
            facts.digests["watched"] = digest % 2**64
            facts.fingerprints.append(group.fingerprints(facts.step, "watched", fingerprints))

        facts.when_ready(pending, deliver)
