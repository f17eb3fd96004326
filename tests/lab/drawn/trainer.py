"""One rank of a drawn training: a user's plain loop, with places at which a fault can act."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent
from tests.lab.drawn.fault import Fault
from tests.lab.drawn.models import Samples, build, criterion_of, data_of
from tests.lab.drawn.recipe import Recipe
from tests.lab.drawn.transforms import Transform
from tests.support.fully_sharded import fully_shard

# A data loader takes some time, and a step is not shorter than people's smallest.
_LEAST_STEP = 0.004


class Order(NamedTuple):
    """What a rank is told to train.

    Attributes:
        folder: where it leaves what it saw.
        watched: whether the agent is attached.
    """

    recipe: Recipe
    fault: Fault | None
    run: str
    server: str
    folder: str
    watched: bool
    full: bool = False


class Trainer:
    """One rank."""

    def __init__(self, order: Order, rank: int) -> None:
        self.order, self.recipe, self.rank = order, order.recipe, rank
        fault = order.fault
        self.fault = fault if fault is not None and rank in fault.ranks else None
        self.transform = Transform(self.fault) if self.fault else None
        self.step = 0
        self.seen: dict[str, list[float]] = {
            name: [] for name in ("loss", "norm", "local", "seconds", "digest")
        }
        # Of the whole job, faulty or not: all ranks have to agree on what a step is.
        self.generator = torch.Generator().manual_seed(10_000 + rank)

    # ------------------------------------------------------------------------------ where it acts

    def acts(self, *sites: str) -> bool:
        """Whether the fault is at one of these places, on this rank, at this step."""
        return self.fault is not None and self.fault.site in sites and self.fault.acts(self.step)

    def inject(self, site: str, tensors: Sequence[torch.Tensor]) -> None:
        """The place where tensors of a site can be changed."""
        if self.transform is None or self.fault is None or self.fault.site != site or not tensors:
            return
        kept = [t.detach().clone() for t in tensors] if self.fault.transform == "stale" else []
        if self.acts(site):
            self.transform.apply(tensors)
        if kept:
            self.transform.remember(kept)

    # ---------------------------------------------------------------------------------- the trainer

    def prepare(self) -> None:
        """Everything before the first step."""
        recipe = self.recipe
        torch.manual_seed(recipe.number)
        self.data, self.held_out = data_of(recipe.model)
        self.net = build(recipe.model, recipe.width, recipe.dropout)
        self.criterion = criterion_of(recipe.model)
        if self.fault is not None and self.fault.site == "activations":
            layers = [
                m for m in self.net.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.GRU)
            ]
            layers[int(self.fault.tensor * (len(layers) - 1))].register_forward_hook(self._hook)
        self.model = self._wrapped()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._watch_local()
        self.optimizer = self._optimizer()
        torch.manual_seed(1_000_000 + recipe.number * 10 + self.rank)
        self.source = self._batches()
        self.held: tuple[torch.Tensor, ...] = ()

    def train(self) -> None:
        """From the first step to the last."""
        self.prepare()
        order = self.order
        monitor: Any = None
        if order.watched:
            options = {"overhead": 1.0} if order.full else {}
            monitor = agent.attach(
                self.model,
                self.optimizer,
                server=order.server,
                run=order.run,
                # Its own: what it is judged by is no other run of the lab that passed before.
                project=order.run,
                **options,
            )
            if order.full:
                monitor._schedule.ask_dense(10**9)
        try:
            while self.step < self.recipe.steps:
                began = time.perf_counter()
                self.one_step()
                self.seen["seconds"].append(time.perf_counter() - began)
                self.step += 1
        finally:
            if monitor is not None:
                monitor.close()
            self._keep()

    def one_step(self) -> None:
        """One optimizer step."""
        recipe, fault = self.recipe, self.fault
        began = time.perf_counter()
        if self.acts("process"):
            self._end()
        self._schedule()
        if not (self.acts("loop") and fault is not None and fault.transform == "no_zero_grad"):
            self.optimizer.zero_grad()
        total = 0.0
        for micro in range(recipe.micro):
            total += self._passes(last=micro == recipe.micro - 1)
        self.seen["loss"].append(total)
        self.seen["local"].append(self._norm())
        self._reduce()
        reduced = [p.grad for p in self.parameters if p.grad is not None]
        self.inject("reduced_gradient", _local(reduced))
        self.seen["norm"].append(self._norm())
        if recipe.clip:
            nn.utils.clip_grad_norm_(self.parameters, recipe.clip)
            self.inject("clipped_gradient", _local(reduced))
        if not (self.acts("loop") and fault is not None and fault.transform == "no_step"):
            self.optimizer.step()
        self._after()
        self._wait(began)

    def _passes(self, *, last: bool) -> float:
        recipe = self.recipe
        batch = self._batch()
        self.model.train(not (self.acts("loop") and self._is("evaluation_mode")))
        ddp = isinstance(self.model, DistributedDataParallel)
        silent = self.acts("loop") and self._is("no_reduction")
        skipped = ddp and (not last or silent)
        if ddp and silent:
            model: nn.Module = self.net
        else:
            model = self.model
        context = self.model.no_sync() if skipped else contextlib.nullcontext()  # type: ignore[operator]
        with context, torch.autocast("cpu", torch.bfloat16, recipe.precision == "bfloat16"):
            loss = self.criterion(model(batch[0]), batch[1])
        if self.acts("loss") and self.fault is not None:
            match self.fault.transform:
                case "scale":
                    loss = loss * self.fault.size
                case "sign":
                    loss = -loss
                case _:
                    loss = loss * float("nan")
        (loss / recipe.micro).backward()
        return float(loss.detach()) / recipe.micro

    def _batch(self) -> Samples:
        if self.acts("time") and self._is("data"):
            self._sleep()
        rows = next(self.source)
        inputs, targets = self.data[0][rows], self.data[1][rows]
        if self.fault is not None and self.fault.site == "batch" and self._is("stale"):
            fresh, self.held = (inputs, targets), self.held or (inputs, targets)
            if self.acts("batch"):
                inputs, targets = self.held
            else:
                self.held = fresh
        elif self.acts("batch") and self._is("permuted"):
            targets = targets[torch.randperm(len(targets), generator=self.generator)]
        elif self.acts("batch") and not self._is("others"):
            inputs = inputs.clone()
            self.inject("batch", [inputs])
        if self.acts("labels"):
            targets = self._wrong_labels(targets)
        return inputs, targets

    def _wrong_labels(self, targets: torch.Tensor) -> torch.Tensor:
        classes = int(self.data[1].max()) + 1
        if self._is("constant"):
            return torch.zeros_like(targets)
        if self._is("shifted"):
            return (targets + 1) % classes
        if self._is("random"):
            return torch.randint(classes, targets.shape, generator=self.generator)
        return targets[torch.randperm(len(targets), generator=self.generator)]

    def _reduce(self) -> None:
        silent = self.order.fault is not None and self.order.fault.transform == "no_reduction"
        if self.recipe.scheme != "manual":
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if silent and self.order.fault is not None and self.order.fault.acts(self.step):
            return  # on all ranks: else the others would wait
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.recipe.world
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _after(self) -> None:
        states = [
            value
            for p in self.parameters
            for value in self.optimizer.state.get(p, {}).values()
            if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point()
        ]
        self.inject("optimizer_state", _local(states))
        self.inject("parameters", _local([p.data for p in self.parameters]))
        buffers = [b for b in self.net.buffers() if b.is_floating_point()]
        self.inject("buffers", buffers)
        recipe = self.recipe
        if recipe.scheme == "local_sgd" and self.step % recipe.every == recipe.every - 1:
            flat = torch.cat([p.data.flatten() for p in self.parameters])
            dist.all_reduce(flat)
            flat /= recipe.world
            parts = flat.split([p.numel() for p in self.parameters])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.data.copy_(part.view_as(parameter))
        if recipe.evaluated and self.step % recipe.evaluated == recipe.evaluated - 1:
            self._evaluate()
        weights = [p.double().flatten() for p in _local([p.data for p in self.parameters])]
        positions = [torch.arange(1, len(w) + 1, dtype=torch.float64) % 97 + 1 for w in weights]
        digest = sum(float(w @ at) for w, at in zip(weights, positions, strict=True))
        self.seen["digest"].append(digest)

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.model.eval()
        if self.recipe.scheme != "fsdp":
            self.criterion(self.net(self.held_out[0]), self.held_out[1])
        self.model.train()

    def _wait(self, began: float) -> None:
        """A step takes what a small step takes, and on a slow rank longer."""
        spent = time.perf_counter() - began
        time.sleep(max(_LEAST_STEP - spent, 0.0))
        if self.acts("time") and self._is("compute"):
            self._sleep()

    def _sleep(self) -> None:
        assert self.fault is not None
        usual = float(np.median(self.seen["seconds"][:20])) if self.seen["seconds"] else 0.01
        time.sleep((self.fault.size - 1) * min(max(usual, _LEAST_STEP), 0.05))

    def _end(self) -> None:
        if self._is("killed"):
            os._exit(9)
        if self._is("raises"):
            raise RuntimeError("the fault of this training")
        time.sleep(600)

    # ------------------------------------------------------------------------------------- inside

    def _is(self, transform: str) -> bool:
        return self.fault is not None and self.fault.transform == transform

    def _hook(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.acts("activations") or not self.model.training or self.transform is None:
            return None
        first = output[0] if isinstance(output, tuple) else output
        fault = self.fault
        assert fault is not None
        match fault.transform:
            case "scale":
                changed = first * fault.size
            case "zero":
                changed = first * 0
            case "noise":
                noise = torch.randn(first.shape, generator=self.generator).to(first.dtype)
                changed = first + fault.size * first.detach().std() * noise
            case _:
                changed = first + float("nan")
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def _wrapped(self) -> nn.Module:
        recipe = self.recipe
        if recipe.scheme in ("ddp", "accumulated"):
            return DistributedDataParallel(self.net)
        if recipe.scheme == "fsdp":
            fully_shard(self.net, mesh=init_device_mesh("cpu", (recipe.world,)))
        return self.net

    def _watch_local(self) -> None:
        """A local gradient is changed where autograd makes it, before any reduction."""
        if self.fault is None or self.fault.site != "local_gradient":
            return
        chosen = range(len(self.parameters))
        if self.fault.extent != "all":
            chosen = range(at := int(self.fault.tensor * len(self.parameters)), at + 1)
        for index in chosen:
            transform = Transform(self.fault)
            self.parameters[index].register_hook(lambda g, t=transform: self._changed(g, t))

    def _changed(self, gradient: torch.Tensor, transform: Transform) -> torch.Tensor:
        changed = gradient.clone().contiguous()
        if self.acts("local_gradient"):
            transform.apply([changed])
        transform.remember([gradient])
        return changed

    def _optimizer(self) -> torch.optim.Optimizer:
        made: dict[str, Any] = {
            "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
            "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
            "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
            "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr),
            "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr),
        }
        optimizer: torch.optim.Optimizer = made[self.recipe.optimizer](
            self.parameters, self.recipe.rate_at(0)
        )
        return optimizer

    def _schedule(self) -> None:
        rate = self.recipe.rate_at(self.step)
        if self.acts("hyperparameters") and self.fault is not None:
            rate *= self.fault.size if self.fault.transform == "scale" else 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _batches(self) -> Iterator[torch.Tensor]:
        recipe, epoch = self.recipe, 0
        while True:
            generator = torch.Generator().manual_seed(recipe.number * 1000 + epoch)
            order = torch.randperm(len(self.data[0]), generator=generator)
            order = order[: len(order) // recipe.world * recipe.world]
            for begin in range(0, len(order) // recipe.world - recipe.batch + 1, recipe.batch):
                rank = self.rank
                if self.acts("batch") and self._is("others"):
                    rank = (rank + 1) % recipe.world
                yield order[rank :: recipe.world][begin : begin + recipe.batch]
            epoch += 1

    def _norm(self) -> float:
        gradients = _local([p.grad for p in self.parameters if p.grad is not None])
        return float(sum(float(g.double().square().sum()) for g in gradients)) ** 0.5

    def _keep(self) -> None:
        path = Path(self.order.folder) / f"rank{self.rank}.npz"
        np.savez(path, **{name: np.array(values) for name, values in self.seen.items()})


def _local(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's own parts, where tensors are sharded."""
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def train(order: Order, rank: int) -> None:
    """What a process of the pool is asked to do."""
    Trainer(order, rank).train()
