"""Ways to train, schedules and pauses that look like a fault and are none."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from rankscope.server.demo.processes import RANKSCOPE
from tests.lab.faults.benign.base import Benign
from tests.lab.faults.case import register
from tests.lab.faults.local_sgd import LocalSGD, ParameterServer
from tests.lab.faults.models import Samples
from tests.lab.faults.precision import Scaled
from tests.lab.faults.resumed import Resumed
from tests.lab.faults.sharded import Pipeline, Sharded
from tests.lab.faults.training import Manual, Training

# The largest number that float16 has.
_LARGEST = 65504.0


def _overflowing(gradient: torch.Tensor) -> torch.Tensor:
    return torch.where(gradient.abs() > _LARGEST, torch.inf, gradient)


@register
class B00(Benign, Training):
    """Nothing special at all."""

    id = "B00"
    what = "plain DDP training"
    steps = 100


@register
class B00b(Benign, Manual):
    """Nothing special at all, with a reduction of one's own."""

    id = "B00b"
    what = "plain training that reduces its gradients itself"
    steps = 100


@register
class B02(Benign, Sharded):
    """Shards."""

    id = "B02"
    what = "FSDP2: every rank holds another part of every tensor"


@register
class B02b(Benign, Sharded):
    """Shards and replicas."""

    id = "B02b"
    what = "HSDP 2x2"
    worlds = (4,)
    replicated = True


@register
class B02c(Benign, Pipeline):
    """Stages."""

    id = "B02c"
    what = "a pipeline of two stages with a tied tensor that is reduced as it must be"


@register
class B03(Benign, LocalSGD):
    """Local SGD between two averages."""

    id = "B03"
    what = "local SGD, averaged every 8 steps"
    steps = 80


@register
class B04(Benign, Training):
    """Gradient accumulation."""

    id = "B04"
    what = "two micro-batches a step, the first one under `no_sync`"

    def passes(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():
            self.backward(self.forward(self.next_batch()) / 2)
        self.backward(self.forward(self.next_batch()) / 2)


@register
class B05(Benign, Manual):
    """Weights that are gathered late."""

    id = "B05"
    what = "each rank updates the tensors it owns; the others get them at the next forward pass"

    def owns(self, index: int) -> bool:
        """Whether this rank updates a tensor."""
        return index % self.world == self.rank

    def trained(self) -> Iterable[nn.Parameter]:
        return [p for i, p in enumerate(self.net.parameters()) if self.owns(i)]

    @torch.no_grad()
    def before_step(self) -> None:
        own = list(self.net.parameters())
        held = [p.flatten() * float(self.owns(i)) for i, p in enumerate(own)]
        flat = torch.cat(held)
        dist.all_reduce(flat)
        for parameter, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
            parameter.copy_(part.view_as(parameter))

    def zero_grad(self) -> None:
        self.net.zero_grad()


@register
class B08(Benign, Training):
    """A warm-up and one odd batch."""

    id = "B08"
    what = "the learning rate warms up steeply; one batch at step 100 is an outlier on all ranks"
    steps = 160
    lr = 1e-2

    def prepared(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 20)
        )

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> Samples:
        if self.step == 100:
            targets = targets[torch.randperm(len(targets))]
        return inputs, targets

    def after_step(self) -> None:
        self.scheduler.step()


@register
class B09(Benign, Training):
    """A schedule with steps and restarts."""

    id = "B09"
    what = "the learning rate drops to a tenth, and a cosine schedule restarts"
    steps = 160

    def prepared(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 40)

    def after_step(self) -> None:
        self.scheduler.step()
        if self.step == 90:
            self.scheduler.base_lrs = [lr / 10 for lr in self.scheduler.base_lrs]


@register
class B09b(Benign, Training):
    """Batches that grow, and other data."""

    id = "B09b"
    what = "the batch doubles at step 60, and from step 100 on the data are noisier"
    models = ("mlp", "cnn")
    steps = 160

    def next_batch(self) -> Samples:
        inputs, targets = super().next_batch()
        if self.step >= 60:
            more = super().next_batch()
            inputs, targets = torch.cat([inputs, more[0]]), torch.cat([targets, more[1]])
        if self.step >= 100:
            inputs = inputs + 0.3 * torch.randn(inputs.shape)
        return inputs, targets


@register
class B10(Benign, Scaled):
    """The scale is searched for."""

    id = "B10"
    what = "a GradScaler begins so high that all ranks skip the first steps"
    init_scale = 2.0**24

    def prepared(self) -> None:
        super().prepared()
        for parameter in self.net.parameters():
            parameter.register_hook(_overflowing)


@register
class B11(Benign, Training):
    """Layers that are not to move."""

    id = "B11"
    what = "everything but `head` is frozen before attach, and a second head is never used"
    find_unused = True

    def build(self) -> nn.Module:
        net = super().build()
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name.startswith("head."))
        net.spare = nn.Linear(4, 4)
        return net


@register
class B14(Benign, Training):
    """A reduction in half precision."""

    id = "B14"
    what = "DDP's hook compresses gradients to float16"

    def wrap(self, net: nn.Module) -> nn.Module:
        model = super().wrap(net)
        assert isinstance(model, DistributedDataParallel)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return model


@register
class B21(Benign, Training):
    """Pauses."""

    id = "B21"
    what = "a slow first step, evaluations, and a checkpoint that rank 0 alone writes for 0.4 s"
    models = ("mlp", "cnn")
    steps = 100

    def before_step(self) -> None:
        if self.step == 0:
            time.sleep(0.5)

    def after_step(self) -> None:
        if self.step % 25 == 24:
            self.evaluate(self.test_set)
            if self.rank == 0:
                time.sleep(0.4)


@register
class B21b(Benign, Resumed):
    """A restart as it should be."""

    id = "B21b"
    what = "a planned restart: all ranks load weights, optimizer and position of the loader"


@register
class B22(Benign, Training):
    """Reports that come late."""

    id = "B22"
    what = "what one rank has to say is kept on its disk and sent after the training"

    def attach(self, **options: Any) -> Any:
        if self.is_target:
            options |= {"mode": "offline", "spool": f"{self.setting.folder}/spool"}
        return super().attach(**options)

    def train(self) -> None:
        super().train()
        if self.is_target:
            subprocess.run(
                [*RANKSCOPE, "sync", f"{self.setting.folder}/spool"],
                env={**os.environ, "RANKSCOPE_SERVER": self.setting.server},
                check=True,
            )


@register
class B24(Benign, ParameterServer):
    """A bounded lag."""

    id = "B24"
    what = "an asynchronous parameter server: workers pull every third step, each at its own time"
    steps = 80

    def pulls(self) -> bool:
        return (self.step + self.rank) % 3 == 0
