"""Stacks on which one process holds several replicas, each a rank: their data and their faults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from tests.lab.faults.case import Case, Expected
from tests.stacks.options import agent_options

BATCH = 16
WORLD = 2


class Replicated(ABC, Case):
    """Three dense layers on digits, on two replicas.

    Attributes:
        chosen: the tensor whose copy on one replica is changed.
    """

    id = "healthy"
    what = "a plain training"
    steps = 60
    chosen = ""

    def expected(self) -> Expected:
        return Expected()

    @property
    def suspects(self) -> int:
        """The second replica: `numpy()` and `numpy.asarray` would see the first one only."""
        return 1

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of both replicas: the first half of the rows is the first one's."""
        images, labels = load_digits(return_X_y=True)
        images = ((images - images.mean()) / images.std()).astype("float32")
        draw = np.random.default_rng(self.seed)
        for step in range(self.length):
            rows = draw.integers(0, len(images), WORLD * BATCH)
            inputs, targets = images[rows], labels[rows]
            self.spoil(step, inputs[BATCH:], targets[BATCH:])
            yield inputs, targets

    @abstractmethod
    def build(self) -> None:
        """The model, on both replicas."""

    @abstractmethod
    def shift(self, amount: float) -> None:
        """Adds to an element of the suspects replica's copy of `chosen`."""

    def spoil(self, step: int, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Changes the suspects replica's part of a batch in place."""

    def before_step(self, step: int) -> None:
        """A step begins."""

    def divisor(self, step: int) -> float:
        """Of the summed gradients."""
        return float(self.world)

    def options(self) -> dict[str, Any]:
        """The options that every case gives the agent."""
        return agent_options(self.setting)

    def sample_all(self, monitors: list[Any]) -> None:
        """With full sampling, everything is sampled at every step."""
        if self.setting.full:
            for monitor in monitors:
                monitor._schedule.ask_dense(10**9)


class OwnStart:
    """A copy that is another one from the beginning."""

    id = "own-start"
    what = "one replica begins with another value of an element"
    onset = 0

    def build(self: Any) -> None:
        super().build()
        self.shift(0.01)

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            stages=("start",),
            ranks=self.all(),
            tensors=frozenset({self.chosen}),
            severity="critical",
        )


class Drifts:
    """A copy that is not like the other any more."""

    id = "drift"
    what = "before one step an element of one replica's copy of a tensor changes"

    def before_step(self: Any, step: int) -> None:
        if step == self.at:
            self.shift(0.125)

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("desync.parameters",),
            ranks=self.odd_one(),
            tensors=frozenset({self.chosen}),
            step=self.at,
        )


class Nan:
    """Inputs that are no numbers."""

    id = "nan"
    what = "at one step one replica's part of the batch holds a NaN"

    def spoil(self: Any, step: int, inputs: np.ndarray, targets: np.ndarray) -> None:
        if step == self.at:
            inputs[0, 0] = np.nan

    def expected(self: Any) -> Expected:
        return Expected(
            # Of a NaN, TensorFlow's relu makes a zero: the loss need not show it, gradients do.
            kinds=("loss.nonfinite", "gradient.nonfinite"),
            ranks=self.one(),
            step=self.at,
        )


class BadLabels:
    """Labels that do not belong to their inputs."""

    id = "bad-labels"
    what = "from one step on the labels of one replica's part are shuffled"
    steps = 200
    onset = 100

    def spoil(self: Any, step: int, inputs: np.ndarray, targets: np.ndarray) -> None:
        if step >= self.at:
            targets[:] = np.roll(targets, 5)

    def expected(self: Any) -> Expected:
        return Expected(
            kinds=("rank.loss_outlier",),
            ranks=self.odd_one(),
            step=self.at,
            tolerance=50,
        )


class Summed:
    """A sum where a mean was meant."""

    id = "summed"
    what = "from one step on the summed gradients are not divided by the number of replicas"

    def divisor(self: Any, step: int) -> float:
        return 1.0 if step >= self.at else super().divisor(step)

    def expected(self: Any) -> Expected:
        return Expected(kinds=("reduction.wrong",), ranks=self.everybody(), step=self.at)


def cases(trainer: type, *faults: type) -> list[type]:
    """The healthy trainer, and one broken by each fault."""
    return [trainer, *(type(f"{f.__name__}{trainer.__name__}", (f, trainer), {}) for f in faults)]
