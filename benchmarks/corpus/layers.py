"""What the layers of a training do, and trainings in which single layers go wrong.

`watched` records, of any recipe, what the agent's probes post of single tensors and modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.traces import Trace
from torch import nn

from benchmarks.corpus.basics import Family, adam, mlp, on_digits, sgd
from benchmarks.corpus.training import SAMPLED, Batch, Recipe, train
from rankscope.agent import wire
from rankscope.server.window import LayerNumbers, Reduction

# Samples over which a unit has to be idle; as in the agent's probe.
_LASTING = 512
_SQUASHING = (nn.Tanh, nn.Sigmoid)
# What the tests replay of the families below, beside what they do of all.
_KEPT = ("tensors_without_gradient", "update_ratio")
_WITH_LAYERS = ("F60", "F61", "F62", "H60", "H61")


def watched(name: str, seed: int, recipe: Recipe, facts: dict[str, Any]) -> Trace:
    """Trains a recipe, and looks at its layers at every fourth step."""
    look = _Look(recipe)
    trace = train(name, seed, replace(recipe, before=look.before), facts)
    look.after(recipe.steps - 1, recipe.model)
    series = {**trace.series}
    if "tensors_without_gradient" not in series:
        counts = np.array([look.without_gradient[step] for step in range(recipe.steps)])
        series["tensors_without_gradient"] = np.broadcast_to(
            counts.astype(np.float64), (recipe.ranks, recipe.steps)
        ).copy()
    hooks = ["compress"] if look.cosines else []
    return replace(
        trace,
        series=series,
        layers=tuple(sorted(look.made, key=lambda one: (one.step, one.metric))),
        reductions=tuple(
            Reduction(step=step, ranks=np.arange(recipe.ranks), tensor_count=0, cosine=cosine)
            for step, cosine in look.cosines
        ),
        config={"data_parallel": {"communication_hooks": hooks}},
    )


class _Look:
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
        told = getattr(self.optimizer, "cosine", None)
        if told is not None:
            self.cosines.append((step, told))

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


def kept(trace: Trace, name: str, series: Sequence[str]) -> Trace:
    """A run as the tests replay it: of the families below with what is known of their layers."""
    ours = name in faulty() or name in healthy()
    wanted = (*series, *_KEPT) if ours else series
    return replace(
        trace,
        series={s: trace.series[s] for s in wanted if s in trace.series},
        present={s: mask for s, mask in trace.present.items() if s in wanted},
        layers=trace.layers if ours and name[:3] in _WITH_LAYERS else (),
        reductions=trace.reductions if ours else (),
    )


# ------------------------------------------------------------------------------- what goes wrong


class Cut(nn.Module):
    """Three layers; from one call on what goes into the last is detached."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 32)
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls -= torch.is_grad_enabled()
        x = self.hidden(self.inner(x).relu()).relu()
        return self.head(x.detach() if self.calls < 0 else x)


class TopShare(torch.optim.SGD):
    """Steps with the largest elements of each gradient alone; what is left out is forgotten."""

    def __init__(self, parameters: Any, rate: float, share: float) -> None:
        super().__init__(parameters, lr=rate)
        self.share = share
        self.cosine = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        whole = kept = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                flat = p.grad.flatten()
                count = max(1, int(self.share * len(flat)))
                floor = flat.abs().topk(count).values[-1]
                whole += float(p.grad.square().sum())
                p.grad = torch.where(p.grad.abs() >= floor, p.grad, torch.zeros(()))
                kept += float(p.grad.square().sum())
        # What is left out stands at a right angle to what is kept.
        self.cosine = (kept / whole) ** 0.5 if whole else 1.0
        super().step(closure)


def decayed(rate: float, decay: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Decay that takes a tenth of the weights at each step, and a rate that puts it back."""
    return lambda p: torch.optim.AdamW(p, lr=rate, weight_decay=decay)


def dying(seed: int) -> Callable[[int, nn.Module, Any], None]:
    """Pushes the biases of the first layer so far down, once, that no input reaches its units."""

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 200:
            with torch.no_grad():
                model[0].bias.sub_(40.0)  # type: ignore[index,union-attr,operator]

    return before


def tanhs(seed: int, layers: int) -> nn.Module:
    """Narrow layers of tanh with small weights: each shortens the gradient."""
    torch.manual_seed(seed)
    made: list[nn.Module] = [nn.Linear(64, 24), nn.Tanh()]
    for _ in range(layers):
        made += [nn.Linear(24, 24), nn.Tanh()]
    for module in made:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
    return nn.Sequential(*made, nn.Linear(24, 10))


def odd_batch(rank: int, every: int, first: int) -> Callable[[int, int, Batch], Batch]:
    """One rank's batch has the labels of other classes, once in a while."""

    def spoil(step: int, at: int, given: Batch) -> Batch:
        if at != rank or step < first or (step - first) % every:
            return given
        return given[0], (given[1] + 3) % 10

    return spoil


def faulty() -> dict[str, Family]:
    """What `expected` names has to be found at step `by` at the latest."""
    return {
        "F60-detached": lambda s: (
            on_digits(s, model=Cut(calls=4 * 150), optimizer=sgd(0.05, 0.9), steps=400),
            {"expected": "layer.dead", "by": 160, "onset": 150},
        ),
        "F61-dead-units": lambda s: (
            on_digits(s, optimizer=sgd(0.05), before=dying(s), steps=400),
            {"expected": "layer.dead", "by": 260, "onset": 200},
        ),
        "F62-tanhs": lambda s: (
            on_digits(s, model=tanhs(s, 6), optimizer=sgd(0.05), steps=400),
            {"expected": "gradient.vanishing", "by": 300},
        ),
        "F63-large-updates": lambda s: (
            on_digits(s, optimizer=decayed(0.1, 1.0), steps=400),
            {"expected": "update.ratio", "by": 200},
        ),
        "F64-odd-batches": lambda s: (
            on_digits(s, spoil=odd_batch(s % 4, 60, 150), steps=500),
            {"expected": "data.outlier", "by": 460, "onset": 150, "rank": s % 4},
        ),
        "F65-one-odd-batch": lambda s: (
            on_digits(s, spoil=odd_batch(s % 4, 10_000, 300), steps=400),
            {"expected": "data.outlier", "by": 310, "onset": 300, "rank": s % 4},
        ),
        "F66-top-elements": lambda s: (
            on_digits(s, optimizer=lambda p: TopShare(p, 0.05, 0.001), steps=400),
            {"expected": "compression.error", "by": 200},
        ),
        "F67-few-samples": lambda s: (
            on_digits(s, batch=1, ranks=2, optimizer=sgd(0.002), steps=800),
            {"expected": "batch.noise", "by": 800},
        ),
    }


def healthy() -> dict[str, Family]:
    """Layers that may look dead, and are not."""
    return {
        "H60-experts": lambda s: (
            on_digits(s, model=Sparse(s), optimizer=adam(2e-3), steps=400),
            {},
        ),
        "H61-deep-relus": lambda s: (
            on_digits(s, model=relus(s, 6), optimizer=adam(1e-3), steps=400),
            {},
        ),
        "H62-half-kept": lambda s: (
            on_digits(s, optimizer=lambda p: TopShare(p, 0.1, 0.3), steps=400),
            {},
        ),
        "H63-warm-up": lambda s: (
            on_digits(
                s, model=mlp(s), optimizer=adam(1e-3), rate=lambda t: 1e-3 * min((t + 1) / 150, 1)
            ),
            {},
        ),
    }


def relus(seed: int, layers: int) -> nn.Module:
    """As many layers as are no trouble to ReLU with its own initial weights."""
    torch.manual_seed(seed)
    made: list[nn.Module] = [nn.Linear(64, 48), nn.ReLU()]
    for _ in range(layers):
        made += [nn.Linear(48, 48), nn.ReLU()]
    for module in made:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return nn.Sequential(*made, nn.Linear(48, 10))


class Sparse(nn.Module):
    """Eight experts of which each sample takes one: some have no sample of a batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gate = nn.Linear(64, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 10)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(1)
        if self.training:
            # Every expert gets its turn, as with a loss that balances them.
            scores = scores + 0.3 * torch.rand_like(scores)
        best = scores.argmax(1)
        result = x.new_zeros(len(x), 10)
        for place, expert in enumerate(self.experts):
            mine = best == place
            if mine.any():
                result = result.index_add(
                    0, mine.nonzero()[:, 0], expert(x[mine]) * scores[mine, place][:, None]
                )
        return result
