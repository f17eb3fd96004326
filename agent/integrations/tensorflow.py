"""TensorFlow's ParameterServerStrategy: the workers of a coordinator, each a rank.

    from rankscope import agent
    watch = agent.tensorflow.Coordinated(coordinator, optimizer.iterations)
    watch.schedule(step_fn, args=(iterator,))  # in place of coordinator.schedule
    watch.join()                               # in place of coordinator.join

The workers run no Python: what a step came to is read off what it returns, once the coordinator has
joined. (Strategies whose replicas are equal: `agent.keras`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "agent.tensorflow needs TensorFlow: pip install 'rankscope[tensorflow]'"
    ) from error

from rankscope.agent.guard import Guard
from rankscope.agent.integrations.parameter_server import Server, Worker, order_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A step that a worker has done.

    Attributes:
        worker: its number, from 0.
        before: updates that had been made when it began.
        after: updates that had been made when it had made its own; more than one of them may be
            others'.
        values: that it returned.
    """

    worker: int
    before: int
    after: int
    values: dict[str, Any]


class Coordinated:
    """Rank 0 is what the parameter servers hold, the ranks from 1 on are the workers.

    Args:
        coordinator: a `ClusterCoordinator`.
        iterations: variable that every update counts up: the optimizer's own.
        **options: as those of `agent.start`.

    Attributes:
        server: watches the pushes.
        workers: one for each worker.
    """

    def __init__(self, coordinator: Any, iterations: Any, **options: Any) -> None:
        self._coordinator = coordinator
        # Keras has a variable of its own around TensorFlow's, whose `value` is a function.
        inner = getattr(iterations, "value", iterations)
        self._iterations = iterations if callable(inner) else inner
        # The strategy's public `cluster_resolver` is None.
        count = coordinator.strategy._num_workers
        version = int(self._iterations.numpy())
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
                numbers. Steps of other kinds (evaluation) belong to the coordinator itself.
            args: of it.
            kwargs: of it.

        Returns:
            A remote value, as the coordinator's; its `fetch` gives a tuple whose first element is
            what `function` returned.
        """
        if function not in self._watched:
            self._watched[function] = self._with_versions(function)
        value = self._coordinator.schedule(self._watched[function], args, kwargs)
        self._waiting.append(value)
        return value

    def join(self) -> None:
        """As `coordinator.join`; then reports the steps that have been done."""
        self._coordinator.join()
        waiting, self._waiting = self._waiting, []
        with self._probe:
            steps = list(map(_read, waiting))
            intervals = [(done.before, done.after) for done in steps]
            for done in (steps[place] for place in order_of(intervals, self.server.version)):
                self.workers[done.worker].step(done.before, **done.values)
                if done.after > done.before:
                    self.server.applied(done.worker + 1, done.before)

    def close(self) -> None:
        """Ends the monitors."""
        for watch in (self.server, *self.workers):
            watch.close()

    def _with_versions(self, function: Callable[..., Any]) -> Any:
        """The step with what it says of itself: TensorFlow keeps the order of the program."""
        iterations = self._iterations

        def watched(*args: Any, **kwargs: Any) -> Any:
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            before = tf.identity(iterations)
            result = function(*args, **kwargs)
            return result, worker, before, tf.identity(iterations)

        return tf.function(watched)

    def _report(self, probe: str, text: str) -> None:
        self.server.monitor.mark(f"agent: {probe}: {text}")


def _read(value: Any) -> _Done:
    result, worker, before, after = value.fetch()
    given = result if isinstance(result, Mapping) else {"loss": result}
    return _Done(
        worker=int(worker),
        before=int(before),
        after=int(after),
        values={name: float(number) for name, number in given.items()},
    )
