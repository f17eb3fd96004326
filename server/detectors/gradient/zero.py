"""Gradients that are exactly zero from the first step on: what is trained cannot learn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.gradients_made import GradientsMade
from rankscope.server.detectors.mechanisms.samples import LayerSample
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step, rows_by_step
from rankscope.server.detectors.mechanisms.wording import count, if_several, number, sentences
from rankscope.server.window import Window

_BESIDE = ("loss", "accuracy", "lr", "update_ratio")


@dataclass(slots=True)
class ZeroGradients:
    """What was seen up to the first gradient that is not zero.

    Attributes:
        observed: steps at which all ranks posted a gradient norm of exactly 0.
        least, most: of the losses so far.
        losses: number of them.
        accuracies: whether all accuracies were exactly 1; None before the first.
        rate: largest learning rate so far; NaN before the first.
        update: largest update over parameters so far; NaN before the first.
        last: name and shape of the last matrix, where a table of tensors has come.
        learns: a gradient that is not zero was seen: from then on, zeros are no matter of this.
        begins: first step of the run; -1 before. One that is resumed may have learned all there is.
        made: gradients that there were before the optimizer stepped.
    """

    observed: int = 0
    losses: int = 0
    least: float = math.inf
    most: float = -math.inf
    accuracies: bool | None = None
    rate: float = math.nan
    update: float = math.nan
    last: tuple[str, tuple[int, ...]] | None = None
    learns: bool = False
    begins: int = -1
    made: GradientsMade = field(default_factory=GradientsMade)
    watch: Watch[None] = field(default_factory=lambda: Watch(clear_after=1))
    _first: int = -1

    def take(self, window: Window, needed: int) -> None:
        """Goes through the gradient norms of a window.

        Args:
            needed: zeros from the start on that are no chance: a batch may have a loss of 0.
        """
        if self.learns:
            return
        if self.begins < 0 and len(window.steps):
            self.begins = int(window.steps[0])
        self.made.take(window)
        beside = {name: mean_by_step(window, name) for name in _BESIDE}
        gradients = rows_by_step(window, "grad_norm")
        for step in sorted({*gradients, *beside["loss"]}):
            self._take_beside(*(beside[name].get(step) for name in _BESIDE))
            row = gradients.get(step)
            if row is None:
                continue
            if np.any(row > 0):
                self.learns = True
                self.watch.good(step)
                return
            if np.isnan(row).any():  # not posted by all, or not finite
                continue
            self.observed += 1
            self._first = step if self.observed == 1 else self._first
            if self.observed >= needed and self._stuck:
                self.watch.bad(step, None, first_step=self._first)
            elif self.watch.current is not None:
                self.watch.good(step)

    def observe(self, sample: LayerSample) -> None:
        """Takes the shapes of the tensors."""
        matrices = [
            (name, shape)
            for name, shape in zip(sample.names, sample.shapes, strict=True)
            if len(shape) > 1
        ]
        self.last = matrices[-1] if matrices else None

    @property
    def constant(self) -> bool:
        """Whether the loss was one and the same, to the last bit."""
        return self.losses > 1 and self.least == self.most

    @property
    def _stuck(self) -> bool:
        # A resumed model without a loss has nothing left to learn.
        nothing_left = self.begins > 0 and self.losses > 0 and max(-self.least, self.most) <= 0
        return not nothing_left and not self.rate == 0

    def _take_beside(
        self, loss: float | None, accuracy: float | None, rate: float | None, update: float | None
    ) -> None:
        if loss is not None and math.isfinite(loss):
            # 0 and -0 are one number.
            self.losses += 1
            self.least, self.most = min(self.least, loss), max(self.most, loss)
        if accuracy is not None and math.isfinite(accuracy):
            self.accuracies = self.accuracies is not False and accuracy == 1
        if rate is not None and math.isfinite(rate):
            self.rate = rate if math.isnan(self.rate) else max(self.rate, rate)
        if update is not None and math.isfinite(update):
            self.update = update if math.isnan(self.update) else max(self.update, update)


def finding(episode: Episode[None], zero: ZeroGradients, world_size: int) -> Finding:
    """What to say of it."""
    step = episode.first_step
    seen = count(zero.observed, "checked step")
    moved = ""
    if zero.update == 0:
        moved = "No step changed any parameter."
    elif zero.update > 0:
        moved = "What moves the parameters all the same is weight decay or momentum."
    if zero.made:
        loss = (
            f"Backward passes make others, of norm {number(zero.made.norm)}: they are set to zero "
            "before the optimizer steps."
        )
        explained = (
            "Possible causes: `zero_grad(set_to_none=False)` between `backward()` and `step()`, "
            "clipping to a length of 0, a factor of 0."
        )
        remedy = "Look at what is done to `p.grad` between `backward()` and `step()`."
    elif zero.constant:
        loss = (
            f"The loss was exactly {number(zero.least + 0.0)} at all {zero.losses:,} recorded "
            "steps, and nothing in it depends on the parameters."
        )
        explained = _constant(zero)
        remedy = (
            "Print the loss of one batch for two different models: it must differ. Check what the "
            "loss is computed from: the model's number of outputs, the shape of the targets, "
            "masks and weights that leave nothing over."
        )
    elif zero.losses > 1:
        loss = (
            f"The loss varies (from {number(zero.least)} to {number(zero.most)}), but none of it "
            "flows back to a parameter."
        )
        explained = (
            "Possible causes: the output passes an operation without a slope (`argmax`, rounding, "
            "a comparison, a clamp beyond its limits), the loss is multiplied by 0, or every unit "
            "on the way is dead."
        )
        remedy = (
            "Compute the loss from the model's outputs themselves, without `detach()`, `.data`, "
            "`argmax` or rounding in between, and look at `dead_units` and `saturated_units`."
        )
    else:
        loss, explained = "", "No loss was recorded that would say more."
        remedy = "Check that the loss is computed from the outputs of this model."
    return episode.finding(
        kind="gradient.vanishing",
        key="zero",
        severity="critical",
        title=f"Every gradient is exactly zero since step {step}: the model cannot learn",
        stage="local_gradient",
        cause=sentences(
            f"All gradients{if_several(world_size, 'of all ranks')} were exactly zero at each of "
            f"{seen}.",
            loss,
            explained,
            moved,
        ),
        remedy=remedy,
        evidence={
            "observed": zero.observed,
            "constant_loss": zero.constant,
            **({"loss": zero.most + 0.0} if zero.losses else {}),
            **({"update_ratio": zero.update} if math.isfinite(zero.update) else {}),
            **({"lr": zero.rate} if math.isfinite(zero.rate) else {}),
        },
    )


def _constant(zero: ZeroGradients) -> str:
    name, shape = zero.last or ("", ())
    if zero.most == 0 and shape and shape[0] == 1:
        return (
            f"The model's last matrix, `{name}`, has one output: if the loss is a cross entropy, "
            "it is over one class, whose probability is 1 whatever the parameters are."
        )
    if zero.most == 0 and zero.accuracies:
        return (
            "The accuracy was exactly 1 at all of them, too: there is one class, or the targets "
            "are computed from the outputs."
        )
    return (
        "Possible causes: it is computed from something else than this model's outputs, or a mask "
        "or weight of 0 leaves nothing of it."
    )
