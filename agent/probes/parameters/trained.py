"""Parameters: what every replica must hold bit for bit, before and after each step."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.agent.fingerprint import FingerprintValues
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, SharedPass, StepFacts, processor_time
from rankscope.agent.probes.norms import lie_here

# Samples before which nothing was written, after which a write is a rare one.
_RARE = 8


class Parameters(Probe):
    """Digests and fingerprints of the trainable parameters.

    After each due step the digest of the whole model (tier `word`: one pass over the parameters),
    at sampled steps digests and sketches tensor by tensor (tier `full`: one pass, twice as dear).
    Before the step after a due one the digest is taken again: parameters that changed since were
    written by something else than the optimizer. That change is posted as a digest of its own, 0
    where there was none, so that ranks which all changed in the same way still agree. Of a model
    that is sharded it is also posted by how much each tensor has changed: with no replica to
    compare with, that says which tensor it was, on which rank. So it is of any other after 8
    samples before which nothing was written; after fewer it is posted as `average`: ranks that
    average their parameters now and then write so. Before a sampled step sketches are taken, too:
    the same pass again.

    Leaves, at sampled steps, `parameters_before` and `parameters`: fingerprints under way of before
    and after the step.
    """

    name = "parameters"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._last: _Sample | None = None
        self._unwritten = 0  # samples before which nothing was written, the last ones
        self._pass = SharedPass("word", "full")

    def start(self, facts: StepFacts) -> None:
        """What the parameters are at attach."""
        self._take(facts, "start", facts.step - 1, sketches=True)

    def before_step(self, facts: StepFacts) -> None:
        """Whether the parameters are still those that the step before left."""
        last, group, full = self._last, self.context.parameters, self.context.full
        if last is not None and (last.step != facts.step - 1 or last.group is not group):
            last = None
        if last is None and not full:
            return
        began = processor_time()
        tensors = group.held()
        plan = group.plan(tensors)
        pending = plan.begin(tensors, sketches=full)
        if full:
            facts.shared["parameters_before"] = pending
        if last is None:
            facts.charge("full", processor_time() - began)
            return
        sample = last

        def deliver() -> None:
            now = pending.result()
            change = (plan.model_digest(now.digests) - sample.digest) % 2**64
            facts.digests["outside_optimizer"] = change
            # Which tensors: for all that is written now and then, as where a bit has flipped; what
            # is written again and again is compared as the step leaves it.
            before, self._unwritten = self._unwritten, 0 if change else self._unwritten + 1
            if not change or sample.fingerprints is None:
                return
            rare = group.is_sharded or before >= _RARE
            if rare or before:
                stage = "outside_optimizer" if rare else "average"
                by = changed_by(sample.fingerprints, now)
                facts.fingerprints.append(group.fingerprints(facts.step, stage, by))

        facts.when_ready(pending, deliver)
        self._pass.charge(facts, processor_time() - began, both=self.context.full)

    def after_step(self, facts: StepFacts) -> None:
        """What the step left."""
        if self.context.word:
            began = processor_time()
            self._take(facts, "parameters", facts.step, sketches=self.context.full)
            self._pass.charge(facts, processor_time() - began, both=self.context.full)

    def disturbed(self) -> None:
        """Another optimizer has moved some of the parameters: who wrote is not examined."""
        self._last = None

    def _take(self, facts: StepFacts, stage: str, of_step: int, *, sketches: bool) -> None:
        group = self.context.parameters
        tensors = group.held()
        plan = group.plan(tensors)
        # The norms of the weights are had along with their sketches.
        pending = plan.begin(tensors, sketches=sketches, squares=sketches and lie_here(tensors))
        sample = self._last = _Sample(group, of_step)
        if sketches:
            facts.shared[stage] = pending

        def deliver() -> None:
            fingerprints = pending.result()
            sample.digest = facts.digests[stage] = plan.model_digest(fingerprints.digests)
            sample.fingerprints = fingerprints
            if sketches:
                facts.fingerprints.append(group.fingerprints(facts.step, stage, fingerprints))

        facts.when_ready(pending, deliver)


@dataclass(slots=True)
class _Sample:
    """The parameters after a step; what a device computes is there once it has."""

    group: TensorGroup
    step: int
    digest: int = 0
    fingerprints: FingerprintValues | None = None


def changed_by(before: FingerprintValues, after: FingerprintValues) -> FingerprintValues:
    """What was added to tensors: digests of 0 for those that are as they were, and sketches.

    Both are linear: the difference of two is that of what has changed.
    """
    sketches = None
    if before.sketches is not None and after.sketches is not None:
        sketches = after.sketches - before.sketches
    return FingerprintValues(after.digests - before.digests, sketches)
