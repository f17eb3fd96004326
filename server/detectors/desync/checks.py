"""What the desync family answers of a run as it stands."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.server.detectors.desync.coverage import Coverage
from rankscope.server.detectors.desync.explain import finding_of
from rankscope.server.detectors.desync.optimizer_settings import STAGE as SETTINGS_STAGE
from rankscope.server.detectors.desync.resumed import resumed_finding
from rankscope.server.detectors.desync.state import FROZEN, KIND_OF_STAGE, DesyncPolicy, DesyncState
from rankscope.server.detectors.mechanisms.wording import agree, count, every, ranks
from rankscope.server.window import Check

# What has to be posted for each kind to be judged.
SUBJECTS = {
    "desync.parameters": "fingerprints of the parameters",
    "desync.gradients": "the norm or fingerprints of the reduced gradient",
    "desync.optimizer": "fingerprints of the optimizer's state",
    "desync.hyperparameters": "the learning rate, the loss scale or other settings",
}


def checks_of(state: DesyncState, policy: DesyncPolicy) -> dict[str, Check]:
    """The answer for each kind of the family, found or not."""
    return {kind: _check(state, policy, kind) for kind in SUBJECTS}


def _check(state: DesyncState, policy: DesyncPolicy, kind: str) -> Check:
    stages = [stage for stage, of in KIND_OF_STAGE.items() if of == kind]
    checked = max(state.checked.get(stage, 0) for stage in stages)
    incident = state.incident
    if state.settings.incident is not None and kind == KIND_OF_STAGE[SETTINGS_STAGE]:
        incident = state.settings.incident
    if incident is None and kind == KIND_OF_STAGE[FROZEN]:
        incident = state.frozen.incident
    if state.resumed.found is not None and kind == "desync.optimizer":
        return Check.open(f"{resumed_finding(state.resumed.found, 0).title}.")
    if incident is None or incident.kind != kind:
        incident = state.inside if state.inside and state.inside.kind == kind else incident
    if incident is not None and incident.kind == kind:
        title = finding_of(incident, policy.drift, policy.critical).title
        return Check.open(f"{title}.")
    if incident is not None and any(incident.broken.get(stage) for stage in stages):
        return Check.suspended(
            f"It differs as well, since {incident.kind} broke at step {incident.first_step}."
        )
    if state.dealt_out and kind == "desync.gradients":
        return Check.not_applicable(
            "Each rank's optimizer holds tensors of its own: a gradient counts on the rank that "
            "steps with it, and is compared with nothing."
        )
    if not checked:
        if state.pushing and kind == "desync.parameters":
            return Check.not_applicable(
                "The ranks push their gradients and post no parameters: there is one copy of these."
            )
        if state.steps < policy.grace:
            return Check.insufficient("No two ranks have been compared yet.")
        if len(state.unpaired) == state.known_ranks > 0:
            return Check.not_applicable(
                f"No two of the {state.known_ranks} ranks hold the same part of the model "
                "(sharded, or stages of a pipeline): there is nothing to compare."
            )
        return Check.missing(f"No two ranks post {SUBJECTS[kind]}.")
    # Of several links that of which most was compared.
    most = max(stages, key=lambda stage: state.checked.get(stage, 0))
    coverage = state.coverage.get(most, Coverage())
    if (lacking := coverage.too_few(checked, policy.grace)) is not None:
        return lacking
    who = count(state.ranks, "rank")
    if state.workers is not None and kind == "desync.parameters":
        oldest = max(state.workers.lags.values())
        return Check.ok(
            f"{who} hold versions of one model, the oldest {count(oldest, 'step')} old."
        )
    if state.period and (kind == "desync.parameters" or _differing(state, stages)):
        return Check.ok(f"{who} are made equal {every(state.period)}, when they are synchronised.")
    alone = coverage.said() + _alone(state)
    differed = max(state.differed.get(stage, 0) for stage in stages)
    how = "bit for bit" if kind == "desync.parameters" else "with each other"
    if not differed:
        return Check.ok(f"{who} agreed {how} at all {count(checked, 'checked step')}.{alone}")
    return Check.ok(
        f"{who} agree {how} now; they did at {checked - differed:,} of "
        f"{count(checked, 'checked step')}.{alone}"
    )


def _alone(state: DesyncState) -> str:
    """Which ranks could not be compared with any other."""
    partly = tuple(r for r in state.unpaired if r in state.partly)
    alone = tuple(r for r in state.unpaired if r not in state.partly)
    reported = ""
    if state.rank_local:
        reported = " Not compared: tensors of which each rank trains a copy of its own."
    if partly:
        reported += f" Of {ranks(partly)}, only tensors that other ranks hold, too, were compared."
    if alone:
        verb = agree(len(alone), "holds")
        reported += f" Not compared: {ranks(alone)}, which {verb} what no other rank holds."
    return reported


def _differing(state: DesyncState, stages: Sequence[str]) -> bool:
    return any(state.differed.get(stage, 0) for stage in stages)
