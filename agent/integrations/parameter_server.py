"""An asynchronous parameter server, and its workers: every record is about a version of the model.

    from rankscope import agent
    watch = agent.parameter_server.Server(weights)        # on rank 0
    watch.applied(worker, version)                        # after each push that was applied

    watch = agent.parameter_server.Worker()               # on the other ranks
    watch.step(version, loss=loss, parameters=weights)    # before the next pull

Workers take no common steps. What they have in common is the number of updates that the server had
made when they pulled: the version. It is sent along with the weights, and is the step that a record
is for. So all that pulled one version are compared with each other and with the server, bit by bit;
how old a version is when the gradient computed on it arrives is its staleness; and what a worker
has pushed is held against what was applied of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from rankscope.agent import start
from rankscope.agent.model.arrays import Arrays


class _Closing:
    monitor: Any

    def close(self) -> None:
        """Ends the monitor: sends what is left (within 5 s)."""
        self.monitor.close()

    def __enter__(self) -> Any:
        self.monitor.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.monitor.__exit__(*error)


class Server(_Closing):
    """What holds the model and applies the gradients that workers push.

    Args:
        parameters: the weights, or a function that returns them; read at versions that are sampled.
        version: number of updates made before.
        **options: as those of `agent.start`.

    Attributes:
        version: number of updates made.
    """

    def __init__(
        self, parameters: Arrays | None = None, *, version: int = 0, **options: Any
    ) -> None:
        self.version = version
        self._parameters = parameters
        self.monitor = start(step=version, **options)
        # Without parameters, too, there is a record of the version that all ranks begin at.
        self.monitor.step(parameters=parameters, pushes=0)

    def applied(self, worker: int, version: int, **values: Any) -> None:
        """A push has made the next version.

        To be called for one push at a time, before its weights are given to anybody.

        Args:
            worker: rank that pushed.
            version: of the weights that its gradient was computed on.
            **values: as for `monitor.step`: `gradients` as they were applied, or further numbers.
        """
        stale = self.version - version
        self.version += 1
        self.monitor.step(
            parameters=self._parameters, push_worker=worker, push_staleness=stale, **values
        )


class Worker(_Closing):
    """What pulls a version, computes a gradient on it and pushes that.

    Args:
        version: that the server began with.
        **options: as those of `agent.start`.

    Attributes:
        pushes: number of gradients so far.
    """

    def __init__(self, *, version: int = 0, **options: Any) -> None:
        self.pushes = 0
        self.monitor = start(step=version, **options)
        # All ranks begin at one version, whichever each of them pulls first.
        self.monitor.log(pushes=0)

    def step(self, version: int, *, parameters: Arrays | None = None, **values: Any) -> None:
        """A gradient has been computed, and is pushed.

        Args:
            version: of the weights that it was computed on.
            parameters: these weights, as they were pulled.
            **values: as for `monitor.step`: `loss`, `local_gradients`, or further numbers. What a
                worker pushes is its own: `gradients` are taken for `local_gradients`.
        """
        if "gradients" in values:
            values = {"local_gradients": values["gradients"], **values}
            del values["gradients"]
        at = self.monitor.go_to(version)
        if at == version:
            values = {"parameters": parameters, "pushes": self.pushes, **values}
        # Another gradient of the same version has made a further one by now, which this rank does
        # not hold: it is recorded under that number, and nothing is compared.
        self.pushes += 1
        self.monitor.step(**values)


def order_of(intervals: Sequence[tuple[int, int]], version: int) -> list[int]:
    """An order in which pushes can have been applied, of what their workers saw of it.

    Each made one version: after the one that its worker began with, and at the latest the one that
    it saw when it was done. Of those that had begun, the one that must be done first comes next
    (Jackson's rule, which finds an order where there is one).

    Args:
        intervals: versions before and after each push; the same where nothing was applied.
        version: number of updates made before all of them.

    Returns:
        Their places in `intervals`, in order.
    """
    waiting = sorted(range(len(intervals)), key=lambda place: intervals[place][0], reverse=True)
    begun: list[tuple[int, int]] = []
    order = []
    while waiting or begun:
        while waiting and (not begun or intervals[waiting[-1]][0] <= version):
            place = waiting.pop()
            heapq.heappush(begun, (intervals[place][1], place))
        after, place = heapq.heappop(begun)
        version += after > intervals[place][0]
        order.append(place)
    return order
