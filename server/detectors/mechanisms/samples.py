"""What is known of single tensors and modules at a step, of all ranks that reported it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rankscope.server.window import Float64, LayerNumbers, Window


@dataclass(frozen=True, slots=True)
class LayerSample:
    """Numbers of one metric at one step.

    Attributes:
        names, shapes, dtypes: of the tensors, as the first rank has them.
        values: float64 [R, T], of the ranks with the same names.
    """

    step: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    values: Float64


def layer_samples(window: Window, *metrics: str) -> Iterator[tuple[int, Mapping[str, LayerSample]]]:
    """Steps at which any of the metrics was posted of single tensors, ascending."""
    wanted = [made for made in window.layers if made.metric in metrics]
    for step, of_step in groupby(wanted, key=lambda made: made.step):
        found = {
            metric: _joined(step, list(made))
            for metric, made in groupby(of_step, key=lambda made: made.metric)
        }
        yield step, found


def _joined(step: int, made: list[LayerNumbers]) -> LayerSample:
    table = made[0].table
    rows = [one.values for one in made if one.table.names == table.names]
    return LayerSample(step, table.names, table.shapes, table.dtypes, np.stack(rows))
