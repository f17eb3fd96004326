"""Which link of the chain comes first, and which was first where samples were at other steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.agent import wire
from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.window import Comparison, Window

# Hyperparameters that are compared as numbers, and how a person calls them.
SETTINGS = {"lr": "learning rate", "amp_scale": "loss scale"}

_ORDER = {stage: number for number, stage in enumerate(wire.STAGES)}

# Links before the optimizer's state: what breaks there goes into it.
_BEFORE = ("reduced_gradient", "clipped_gradient", "hyperparameters")


def state_was_first(
    config: Mapping[str, Any], incident: Divergence, broken: Sequence[Comparison]
) -> bool:
    """Whether parameters that were seen to differ are the consequence of the optimizer's state.

    The state is examined less often than the parameters. It is made of gradients: as long as these
    agree, parameters that differ do not change it, but for a decay that is added to the gradient.

    Args:
        config: what the ranks said of themselves.
        incident: began with the parameters.
        broken: comparisons of a later step that found a difference.
    """
    if incident.kind != "desync.parameters" or incident.stage == "start" or incident.at_start:
        return False
    if incident.missed or incident.lag[0] or incident.tentative or not incident.tensors:
        return False
    if any(incident.broken.get(stage) for stage in _BEFORE):
        return False
    found = next((c for c in broken if c.stage == "optimizer_state"), None)
    if found is None or found.deviating != incident.ranks or not found.tensors:
        return False
    # It was equal when the parameters were seen to differ already.
    if incident.compared.get("optimizer_state", 0) > incident.broken.get("optimizer_state", 0):
        return False
    names = {tensor.name for tensor in found.tensors}
    same = names == {tensor.name for tensor in incident.tensors}
    return same and not incident.everywhere and not _decay_in_gradients(config)


def _decay_in_gradients(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer adds a share of the parameters to their gradients; unknown: yes."""
    groups = config.get("parameter_groups")
    if not groups:
        return True
    decoupled = config.get("optimizer") == "AdamW"
    return any(
        group.get("weight_decay", 0) and not group.get("decoupled_weight_decay", decoupled)
        for group in groups
    )


def place_of(window: Window, comparison: Comparison) -> float:
    """Place in the chain of a step.

    The loss scale is at work before there is a gradient. Momentum, betas and weight decay go into
    the optimizer's state of the same step; the learning rate goes into no optimizer's state: where
    it differs together with that, both were restored or written at once.
    """
    if comparison.stage == "hyperparameters" and not comparison.equal:
        setting, _ = differing_setting(window, comparison)
        if setting == SETTINGS["amp_scale"]:
            return _ORDER["reduced_gradient"] - 0.5
        if not setting:
            return _ORDER["optimizer_state"] - 0.5
    return _ORDER[comparison.stage]


def differing_setting(window: Window, comparison: Comparison) -> tuple[str, dict[int, float]]:
    """Which setting differs at a step, and what it is on each rank; ("", {}) for none of these."""
    column = int(np.searchsorted(window.steps, comparison.step))
    for name, called in SETTINGS.items():
        series = window.series.get(name)
        if series is None:
            continue
        rows = np.isin(window.ranks, comparison.ranks) & series.present[:, column]
        held = series.values[rows, column].tolist()
        if len(set(held)) > 1:
            return called, dict(zip(window.ranks[rows].tolist(), held, strict=True))
    return "", {}


def held_elsewhere(window: Window, comparison: Comparison, called: str) -> set[float]:
    """What a setting is, at a step, on ranks that hold other parts of the model."""
    column = int(np.searchsorted(window.steps, comparison.step))
    for name, setting in SETTINGS.items():
        series = window.series.get(name)
        if series is not None and setting == called:
            rows = ~np.isin(window.ranks, comparison.ranks) & series.present[:, column]
            return set(series.values[rows, column].tolist())
    return set()


def reduces_no_longer(window: Window, step: int) -> bool:
    """Whether gradients are not reduced from some step before on, as post-local SGD has it."""
    parallel = window.config.get("data_parallel")
    first = parallel.get("local_from") if isinstance(parallel, Mapping) else None
    begun = max((begins[-1] for begins in window.begins.values() if begins), default=0)
    return isinstance(first, int) and step >= begun + first
