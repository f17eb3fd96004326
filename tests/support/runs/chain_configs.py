"""Configurations that the ranks of a training post, and what is wrong with one of them."""

from __future__ import annotations

from typing import Any

from tests.support.runs.hooks import Averaged
from tests.support.runs.posted import NAMES, config_of


def configs_of(
    fault: str, ranks: int, rank: int, *, reducer: Averaged, wrapped: bool
) -> list[dict[str, Any]]:
    """Of each rank, what it posts of its configuration.

    Args:
        fault: as in `chain`; of the rank `rank`, where one rank is concerned.
        reducer: what reduces the gradients.
        wrapped: whether a wrapper reduces them, and not the loop itself.
    """
    configs = [config_of() for _ in range(ranks)]
    for config in configs:
        config["data_parallel"] |= reducer.config
    if not wrapped:
        configs = [config_of(data_parallel={}) for _ in range(ranks)]
    if fault == "owners-reduced":
        for r, config in enumerate(configs):
            missing = [name for i, name in enumerate(NAMES) if i % ranks != r]
            config["optimizer_tensors"] |= {
                "count": len(NAMES) - len(missing),
                "share_of_trainable": 1 - len(missing) / len(NAMES),
                "missing": missing,
                "missing_count": len(missing),
                "order_digest": str(r),
            }
    if fault == "other-learning-rate":
        configs[rank] = config_of(parameter_groups=[{"lr": 0.1, "momentum": 0.9}])
    if fault == "tolerates":
        group = {"lr": 0.05, "tolerance_grad": 1e-7, "tolerance_change": 1e-9}
        configs = [config_of(parameter_groups=[group])] * ranks
    if fault == "other-commit":
        configs[rank] = config_of(git_commit="9e01bb")
    if fault == "other-torch":
        configs[rank] = config_of(torch="2.12.1")
    if fault == "other-threads":
        configs[rank] = config_of(threads=7)
    if fault == "other-trainable":
        frozen = ["head.weight", "head.bias"]
        configs[rank] = config_of(trainable_digest="dd", frozen_tensors=2, frozen=frozen)
    if fault == "other-dropout":
        configs[rank] = config_of(module_settings={"Dropout.p": {"0.1": 1, "0.5": 1}})
    if fault == "other-width":
        settings = {"Dropout.p": {"0.1": 2}, "Net().width": {"9": 1}}
        configs[rank] = config_of(module_settings=settings)
    if fault == "own-numbers":
        configs = [config_of(module_settings={"Net().rank": {str(r): 1}}) for r in range(ranks)]
    if fault in ("holds-others", "holds-others-frozen", "holds-most"):
        missing = ["head.weight", "head.bias"] if fault == "holds-most" else list(NAMES)
        held_share = 1.0 if fault == "holds-most" else 0.0
        configs = [
            config_of(
                optimizer_tensors={
                    "count": len(NAMES) if held_share == 0 else len(NAMES) - 2,
                    "of_the_model": held_share,
                    "share_of_trainable": 1 - len(missing) / len(NAMES),
                    "missing": missing,
                    "missing_count": len(missing),
                    "order_digest": "cc",
                }
            )
        ] * ranks
    return configs
