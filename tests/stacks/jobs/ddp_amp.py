"""DDP with mixed precision: passes in float16, and a GradScaler over them."""

import torch

from tests.lab.faults.case import Expected
from tests.lab.faults.precision import Scaled
from tests.stacks.faults import Flip, OwnGradient, OwnRate, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Mixed(Scaled):
    """Gradients are clipped after their scale was taken off."""

    def forward(self, batch):
        with torch.autocast("cpu", dtype=torch.float16):
            return super().forward(batch)

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)


class OwnScale:
    """As if its scaler had been restored alone."""

    id = "own-scale"
    what = "from one step on one rank's loss scale is half of the others'"

    def before_step(self):
        if self.is_target and self.step == self.at:
            self.scaler.update(self.scaler.get_scale() / 2)
        super().before_step()

    def expected(self):
        return Expected(
            kinds=("desync.hyperparameters",),
            stages=("hyperparameters",),
            ranks=self.odd_one(),
            step=self.at,
        )


CASES = cases(Mixed, Flip, OwnGradient, OwnRate, OwnScale)
