"""TensorFlow's ParameterServerStrategy: the workers of a coordinator, each a rank.

    from rankscope import agent
    watch = agent.tensorflow.Coordinated(coordinator, optimizer.iterations)
    watch.schedule(step_fn, args=(iterator,))  # in place of coordinator.schedule
    watch.join()                               # in place of coordinator.join

The workers run no Python: what a step came to is read off what it returns, once the coordinator has
joined. (Strategies whose replicas are equal: `agent.keras`.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "agent.tensorflow needs TensorFlow: pip install 'rankscope[tensorflow]'"
    ) from error

from rankscope.agent.guard import Guard
from rankscope.agent.integrations.parameter_server import Server, Worker

_TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")


class Coordinated:
    """Rank 0 is what the parameter servers hold, the ranks from 1 on are the workers.

    Args:
        coordinator: a `ClusterCoordinator`.
        iterations: variable that every update counts up: the optimizer's own.
        **options: as those of `agent.start`.

    Attributes:
        server: monitors the pushes.
        workers: one for each worker.
    """

    def __init__(self, coordinator: Any, iterations: Any, **options: Any) -> None:
        self._coordinator = coordinator
        self._iterations = getattr(iterations, "value", iterations)
        if callable(self._iterations):
            self._iterations = iterations
        version = int(self._iterations.numpy())
        count = coordinator.strategy.extended._num_workers
        place = {"world_size": count + 1, "version": version}
        self.server = Server(rank=0, **place, **options)
        options["run"] = self.server.monitor.run
        self.workers = [Worker(rank=n + 1, **place, **options) for n in range(count)]
        self._watched: dict[Any, Any] = {}
        self._waiting: list[Any] = []
        self._guard = Guard(self._report, everywhere=True)
        self._probe = self._guard.probe("tensorflow")

    def schedule(self, function: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """As `coordinator.schedule`.

        Args:
            function: one training step; returns the loss, or a mapping with `loss` and other
                numbers.
            args: of it.
            kwargs: of it.

        Returns:
            What the coordinator makes of it: a remote value of what `function` returns, of the
            version it began with and of the one it had made.
        """
        if function not in self._watched:
            self._watched[function] = self._with_versions(function)
        value = self._coordinator.schedule(self._watched[function], args, kwargs)
        self._waiting.append(value)
        return value

    def join(self) -> None:
        """As `coordinator.join`; then tells of the steps that have been done."""
        self._coordinator.join()
        waiting, self._waiting = self._waiting, []
        with self._probe:
            done = [_Done(value) for value in waiting]
            # In the order in which they were applied.
            for step in sorted(done, key=lambda s: s.after):
                self.workers[step.worker].step(step.before, **step.numbers)
                self.server.applied(step.worker + 1, min(step.before, self.server.version))

    def close(self) -> None:
        """Ends the monitors."""
        for one in (self.server, *self.workers):
            one.close()

    def _with_versions(self, function: Callable[..., Any]) -> Any:
        iterations = self._iterations

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = tf.identity(iterations)
            result = function(*args, **kwargs)
            # Reads of a variable and writes to it are done in the order of the program.
            return result, before, tf.identity(iterations)

        return tf.function(watched)

    def _report(self, probe: str, text: str) -> None:
        self.server.monitor.mark(f"agent: {probe}: {text}")


class _Done:
    """A step that a worker has done.

    Attributes:
        worker: its number, from 0.
        before, after: updates that had been made when it began, and when it had made its own.
        numbers: that it returned.
    """

    def __init__(self, value: Any) -> None:
        result, before, after = value.fetch()
        self.before, self.after = int(before), int(after)
        given: Mapping[str, Any] = result if isinstance(result, Mapping) else {"loss": result}
        self.numbers: dict[str, Any] = {
            name: float(np.asarray(number)) for name, number in given.items()
        }
        # Where a value is says who made it.
        places = (str(tensor.device) for tensor in tf.nest.flatten(value._get_values()))
        tasks = [match.group(1) for place in places if (match := _TASK.search(place))]
        self.worker = int(tasks[0])
