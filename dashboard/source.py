"""What the figures of the pages need to know, and who must provide it.

The pages know neither the database nor the server's modules: whoever mounts them hands over a
`Source`. Lists, tables and alerts come to the browser by the public REST interface instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rankscope.dashboard.figures import Curve, Mark, Scaled
from rankscope.dashboard.figures.arrays import Bool, Float64, Int64


@dataclass(frozen=True, slots=True)
class Divergence:
    """One link of the chain over the steps. Shapes: R ranks, S stretches of equal outcome.

    Attributes:
        stages: all links that were compared in this run, in the order of the chain.
        ranks: [R], ascending.
        steps: int64 [S], ascending: each entry holds from here ...
        until: int64 [S]: ... up to here.
        counts: int64 [S]: how many steps of it were compared.
        relative: float64 [R, S]: 0 for equal bits, NaN for a difference of unknown size.
        checked: bool [R, S].
        undecided: steps without a majority.
    """

    stage: str
    stages: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: Int64
    until: Int64
    counts: Int64
    relative: Float64
    checked: Bool
    undecided: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Distances:
    """How far any two ranks differ at one step.

    Attributes:
        ranks: [R], ascending.
        distance: float64 [R, R], L2; NaN where it is not known.
        equal: bool [R, R]: the same bits.
        suspects: ranks that an alert about this step blames.
    """

    stage: str
    step: int
    ranks: tuple[int, ...]
    distance: Float64
    equal: Bool
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerValues:
    """One metric of all tensors of a table, as one rank reported it.

    Attributes:
        rank: who reported it.
        names: [T], in the model's order.
        steps: int64 [S], ascending.
        values: float64 [T, S]: NaN where a tensor was not there, infinity for what is not finite.
    """

    rank: int
    names: tuple[str, ...]
    steps: Int64
    values: Float64


@dataclass(frozen=True, slots=True)
class DataRead:
    """What the ranks read; samples by `figures.data.CLASSES`.

    Attributes:
        ranks: [R], ascending.
        steps: int64 [S], ascending: those of which batches are known.
        of_ranks, of_steps: int64 [R, 4] and [S, 4].
        shared: float64 [R, R]: share of the samples of a pass that two ranks had both; NaN where it
            is not known.
        passes: steps at which a pass through the data begins.
        by_samples: samples were identified; else whole batches count as samples.
        complete: whether it is of all steps; else of the newest.
    """

    ranks: tuple[int, ...]
    steps: Int64
    of_ranks: Int64
    of_steps: Int64
    shared: Float64
    passes: tuple[int, ...]
    by_samples: bool
    complete: bool


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """The gradient noise scale over the steps.

    Attributes:
        steps: int64 [S], ascending.
        scale: float64 [S], samples: infinite where no signal is left, NaN where it is not known.
        batch: float64 [S], samples of all ranks.
        counted: whether samples are reported; else the batch of one rank counts as one.
    """

    steps: Int64
    scale: Float64
    batch: Float64
    counted: bool


@dataclass(frozen=True, slots=True)
class AlertFacts:
    """What the chart of an alert needs to know of it.

    Attributes:
        tensor: the first that it names; empty where it names none.
        of_tensor: names of the metrics that the run has of that tensor.
    """

    kind: str
    stage: str
    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    evidence: Mapping[str, Any]
    tensor: str = ""
    of_tensor: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of a series is wanted.

    Attributes:
        ranks: None for all.
        from_step, to_step: both included; None for no bound.
        max_points: raw points where they fit, else as many buckets.
        steady: fewer buckets, by up to a half, that stay what they are while a run goes on.
    """

    ranks: Collection[int] | None = None
    from_step: int | None = None
    to_step: int | None = None
    max_points: int = 600
    steady: bool = False


class Source(Protocol):
    """Arrays of a run. All methods may be called from any thread."""

    def ranks(self, run: str) -> Sequence[int] | None:
        """The ranks seen so far, ascending; None where there is no such run."""

    def similar(self, run: str) -> Sequence[str]:
        """Ids of runs that may have been meant, where there is no such run."""

    def curves(self, run: str, metric: str, wanted: Selection) -> Sequence[Curve]:
        """The metric's curves, as `GET /api/v1/runs/{run}/series` gives them."""

    def divergence(
        self, run: str, *, stage: str | None, from_step: int | None, to_step: int | None
    ) -> Divergence:
        """Comparisons of a link; `stage` None: the one that says most."""

    def distances(self, run: str, *, stage: str | None, step: int | None) -> Distances | None:
        """At the sampled step nearest to `step` (None: the latest); None where none was sampled."""

    def layers(self, run: str, metric: str, table: str, wanted: Selection) -> LayerValues | None:
        """A metric of all tensors, of the first of the wanted ranks; None where there is none."""

    def data(self, run: str, *, from_step: int | None, to_step: int | None) -> DataRead | None:
        """What the ranks read; None where no batch is known."""

    def noise(
        self, run: str, *, from_step: int | None, to_step: int | None
    ) -> GradientNoise | None:
        """The gradient noise scale; None where what is recorded does not suffice."""

    def scaling(self, run: str) -> Sequence[Scaled]:
        """The run beside runs of the same training with fewer ranks; empty without any."""

    def metrics(self, run: str) -> Sequence[str]:
        """Names of the run's series, without those of single tensors."""

    def alert(self, run: str, alert: str) -> AlertFacts | None:
        """An alert of the run; None where it has no such alert."""

    def marks(self, run: str) -> Sequence[Mark]:
        """The run's alerts that are no consequences of others."""

    def suspects(self, run: str) -> Sequence[int]:
        """Ranks that open alerts name."""
