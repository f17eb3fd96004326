"""Records, of any training of the corpus, what the agent's probes post of tensors and modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rankscope.agent import wire
from rankscope.server.window import LayerNumbers, Reduction
from tests.lab.corpus.training import SAMPLED, Recipe, train
from tests.support.runs.traces import Trace

# Samples over which a unit has to be idle; as in the agent's probe.
_LASTING = 512
_SQUASHING = (nn.Tanh, nn.Sigmoid)


def watched(name: str, seed: int, recipe: Recipe, facts: dict[str, Any]) -> Trace:
    """Trains a recipe, and samples its layers at every fourth step."""
    watched = _Watched(recipe)
    trace = train(name, seed, replace(recipe, before=watched.before), facts)
    watched.after(recipe.steps - 1, recipe.model)
    series = {**trace.series}
    if "tensors_without_gradient" not in series:
        counts = np.array([watched.without_gradient[step] for step in range(recipe.steps)])
        series["tensors_without_gradient"] = np.broadcast_to(
            counts.astype(np.float64), (recipe.ranks, recipe.steps)
        ).copy()
    hooks = ["compress"] if watched.cosines else []
    return replace(
        trace,
        series=series,
        layers=tuple(sorted(watched.made, key=lambda one: (one.step, one.metric))),
        reductions=tuple(
            Reduction(step=step, ranks=np.arange(recipe.ranks), tensor_count=0, cosine=cosine)
            for step, cosine in watched.cosines
        ),
        config={"data_parallel": {"communication_hooks": hooks}},
    )


class _Watched:
    """Called before each step, it sees what the one before has left."""

    def __init__(self, recipe: Recipe) -> None:
        self.made: list[LayerNumbers] = []
        self.without_gradient: dict[int, int] = {}
        self.optimizer: Any = None
        self.cosines: list[tuple[int, float]] = []
        self._before = recipe.before
        self._old: list[torch.Tensor] = []
        named = list(recipe.model.named_parameters())
        self._table = wire.TensorTable(
            names=tuple(name for name, _ in named),
            shapes=tuple(tuple(p.shape) for _, p in named),
            dtypes=("float32",) * len(named),
            shards=("",) * len(named),
        )
        units = [
            (name, module)
            for name, module in recipe.model.named_modules()
            if isinstance(module, nn.ReLU | nn.Tanh | nn.Sigmoid)
        ]
        self._units = wire.TensorTable(
            names=tuple(name for name, _ in units),
            shapes=((),) * len(units),
            dtypes=tuple(type(module).__name__ for _, module in units),
            shards=("",) * len(units),
        )
        self._squashing = np.array([isinstance(module, _SQUASHING) for _, module in units])
        self._active: list[Any] = [None] * len(units)
        self._earlier: list[Any] = [None] * len(units)
        self._samples = 0
        self._since = 0
        for place, (_, module) in enumerate(units):
            module.register_forward_hook(self._hook(place))

    def before(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        if step > 0:
            self.after(step - 1, model)
        if self._before is not None:
            self._before(step, model, optimizer)
        if step % SAMPLED == 0:
            self._old = [p.detach().clone() for p in model.parameters()]

    def after(self, step: int, model: nn.Module) -> None:
        """What a step has left."""
        parameters = list(model.parameters())
        self._gradients(step, parameters)
        if step % SAMPLED:
            return
        self._norms(step, parameters)
        self._shares(step)
        cosine = getattr(self.optimizer, "cosine", None)
        if cosine is not None:
            self.cosines.append((step, cosine))

    def _gradients(self, step: int, parameters: list[Any]) -> None:
        self.without_gradient[step] = sum(not bool(p.grad.any()) for p in parameters)

    def _norms(self, step: int, parameters: list[Any]) -> None:
        weights = np.array([float(p.detach().norm()) for p in parameters])
        moved = np.array(
            [float((p.detach() - old).norm()) for p, old in zip(parameters, self._old, strict=True)]
        )
        with np.errstate(all="ignore"):
            ratios = moved / weights
        for metric, values in (
            ("grad_norm", np.array([float(p.grad.norm()) for p in parameters])),
            ("weight_norm", weights),
            ("update_ratio", ratios),
        ):
            self._say(step, metric, self._table, values)

    def _hook(self, place: int) -> Callable[..., None]:
        def called(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            flat = output.detach().reshape(-1, output.shape[-1])
            if isinstance(module, nn.ReLU):
                active = (flat != 0).any(0)
            else:
                inside = flat if isinstance(module, nn.Tanh) else 2 * flat - 1
                active = (inside.abs() <= 0.99).any(0)
            known = self._active[place]
            self._active[place] = active if known is None else known | active
            self._samples += len(flat) if place == 0 else 0

        return called

    def _shares(self, step: int) -> None:
        """As the agent's: of the last 512 samples or more, up to twice as many."""
        if not self._active or any(one is None for one in self._active):
            return
        pairs = list(zip(self._active, self._earlier, strict=True))
        known = all(earlier is not None for _, earlier in pairs)
        shares = [
            1.0 - float((active if earlier is None else active | earlier).float().mean())
            for active, earlier in pairs
        ]
        if self._samples >= _LASTING:
            self._earlier, self._samples, known = self._active, 0, True
            self._active = [torch.zeros_like(one) for one in self._active]
        if known:
            for what, mine in (("dead", ~self._squashing), ("saturated", self._squashing)):
                if mine.any():
                    values = np.where(mine, shares, np.nan)
                    self._say(step, f"{what}_units_lasting", self._units, values)

    def _say(self, step: int, metric: str, table: wire.TensorTable, values: Any) -> None:
        self.made.append(LayerNumbers(step=step, rank=0, metric=metric, table=table, values=values))
