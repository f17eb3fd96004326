"""Keras on TensorFlow: a callback that watches every replica as a rank of its own.

    from rankscope import agent
    model.fit(data, callbacks=[agent.keras.RankscopeCallback()])

Under MirroredStrategy one process holds all replicas: each gets a monitor. Losses and the norms of
local gradients are taken inside the compiled step, before Keras averages over replicas and over the
epoch, that of the applied one after it has, and are left in variables of which every replica has
its own value. The model's variables are
read replica by replica: `numpy()` reads the first one only, whatever the others hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

try:
    import keras
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "agent.keras needs TensorFlow: pip install 'rankscope[tensorflow]'"
    ) from error

from rankscope.agent import start
from rankscope.agent.guard import Guard


class Replicas:
    """The replicas of one model in this process, each with a monitor.

    Also for custom loops under a strategy with several replicas in one process.

    Args:
        strategy: whose replicas they are; the one in scope by default.
        variables: what the replicas hold copies of: Keras's or TensorFlow's variables.
        step: number of steps taken before.
        **options: as those of `agent.start`.
    """

    def __init__(
        self, variables: Any, *, strategy: Any = None, step: int = 0, **options: Any
    ) -> None:
        self.strategy = strategy or tf.distribute.get_strategy()
        self._variables = variables
        self.monitors: list[Any] = []
        here = len(self.strategy.extended.worker_devices)
        world = self.strategy.num_replicas_in_sync
        for replica in range(here):
            # One process for each replica: the launcher says which rank this one is.
            place = {} if here < world or here == 1 else {"rank": replica, "world_size": world}
            if self.monitors:
                options["run"] = self.monitors[0].run
            monitor = start(step=step, parameters=self.parameters(replica), **place, **options)
            self.monitors.append(monitor)

    def parameters(self, replica: int) -> Callable[[], Mapping[str, Any]]:
        """The copies of one replica, read where they are asked for."""
        return lambda: {name: copy_of(v, replica) for name, v in self._named()}

    def step(self, **values: Any) -> None:
        """Ends a step on all replicas.

        Args:
            **values: as for `monitor.step`; what `strategy.run` returned is split by replica, what
                is the same on all replicas is given to each.
        """
        for replica, monitor in enumerate(self.monitors):
            own = {name: self._own(value, replica) for name, value in values.items()}
            monitor.step(parameters=self.parameters(replica), **own)

    def log(self, **scalars: Any) -> None:
        """As `monitor.log`, on all replicas."""
        for monitor in self.monitors:
            monitor.log(**scalars)

    def close(self) -> None:
        """As `monitor.close`, on all replicas."""
        for monitor in self.monitors:
            monitor.close()

    def _own(self, value: Any, replica: int) -> Any:
        if isinstance(value, Mapping):
            return {name: self._own(part, replica) for name, part in value.items()}
        parts = self.strategy.experimental_local_results(value)
        return parts[replica % len(parts)]

    def _named(self) -> list[tuple[str, Any]]:
        found: dict[str, Any] = {}
        for variable in self._variables:
            name = getattr(variable, "path", variable.name).replace("/", ".").removesuffix(":0")
            # Names of TensorFlow's own variables need not be different.
            while name in found:
                name += "_"
            found[name] = variable
        return list(found.items())


def copy_of(variable: Any, replica: int) -> Any:
    """One replica's copy of a variable; the variable itself where there is one only."""
    held = variable.value if isinstance(variable, keras.Variable) else variable
    copies = getattr(held, "values", None)
    return copies[replica] if isinstance(copies, tuple | list) else held


class RankscopeCallback(keras.callbacks.Callback):
    """Watches `model.fit`.

    Args:
        **options: as those of `agent.start`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._replicas: Replicas | None = None
        # Of each replica, left there by the compiled step: variables with a value for each.
        self._taken: dict[str, Any] = {}
        self._originals: list[tuple[Any, str, Any]] = []
        self._guard = Guard(self._report, everywhere=True)
        self._probe = self._guard.probe("keras")

    @property
    def monitors(self) -> list[Any]:
        """Of the replicas of this process; empty before the training."""
        return [] if self._replicas is None else self._replicas.monitors

    def on_train_begin(self, logs: Any = None) -> None:
        """Attaches."""
        model = self.model
        strategy = getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy()
        with self._probe:
            self._tap(model, strategy)
        first = int(model.optimizer.iterations.numpy())
        self._replicas = Replicas(
            model.trainable_variables, strategy=strategy, step=first, **self._options
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Ends the step."""
        with self._probe:
            if self._replicas is None:
                return
            rate = copy_of(self.model.optimizer.learning_rate, 0)
            self._replicas.step(lr=float(np.asarray(rate)), **self._taken)

    def on_test_end(self, logs: Any = None) -> None:
        """What an evaluation came to: averages over all replicas."""
        with self._probe:
            if self._replicas is not None and logs:
                self._replicas.log(**{f"eval/{name}": float(v) for name, v in logs.items()})

    def on_train_end(self, logs: Any = None) -> None:
        """Ends the monitors."""
        with self._probe:
            for owner, name, original in self._originals:
                setattr(owner, name, original)
            self._originals.clear()
        if self._replicas is not None:
            self._replicas.close()

    def _tap(self, model: Any, strategy: Any) -> None:
        """Has the compiled step leave each replica's loss and gradient norm in variables."""
        loss, norm, applied = (_of_each_replica(strategy) for _ in range(3))
        # Keras divides a replica's loss by their number, so that the sum of gradients is the mean.
        scale = float(strategy.num_replicas_in_sync)
        compute_loss, apply_gradients = model.compute_loss, model.optimizer.apply_gradients
        # Keras has no public place between the reduction and the step.
        reduce: Any = getattr(model.optimizer, "_all_reduce_sum_gradients", None)

        def computing_loss(*args: Any, **kwargs: Any) -> Any:
            value = compute_loss(*args, **kwargs)
            if kwargs.get("training", True) and not tf.distribute.in_cross_replica_context():
                loss.assign(tf.cast(value, tf.float32) * scale)
            return value

        def applying_gradients(pairs: Any) -> Any:
            pairs = list(pairs)
            if not tf.distribute.in_cross_replica_context():
                held = [gradient for gradient, _ in pairs if gradient is not None]
                norm.assign(tf.cast(tf.linalg.global_norm(held), tf.float32) * scale)
            return apply_gradients(pairs)

        def reducing(pairs: Any) -> Any:
            reduced = reduce(pairs)
            if not tf.distribute.in_cross_replica_context():
                held = [gradient for gradient, _ in reduced if gradient is not None]
                applied.assign(tf.cast(tf.linalg.global_norm(held), tf.float32))
                # Optimizers around others leave the reduction to those: then this is not called.
                self._taken["grad_norm"] = applied
            return reduced

        taps = [
            (model, "compute_loss", computing_loss),
            (model.optimizer, "apply_gradients", applying_gradients),
        ]
        if reduce is not None:
            taps.append((model.optimizer, "_all_reduce_sum_gradients", reducing))
        for owner, name, tap in taps:
            self._originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, tap)
        # A step that was compiled before would not see them.
        model.make_train_function(force=True)
        self._taken = {"loss": loss, "grad_norm_local": norm}

    def _report(self, probe: str, text: str) -> None:
        for monitor in self.monitors:
            monitor.mark(f"agent: {probe}: {text}")


def _of_each_replica(strategy: Any) -> Any:
    with strategy.scope():
        return tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
