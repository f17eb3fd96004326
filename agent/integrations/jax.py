"""JAX: the devices of this process, each a rank, whose copies of replicated arrays are compared.

    from rankscope import agent
    watch = agent.jax.Replicas(parameters)
    watch.step(loss=loss, parameters=parameters)  # once a step

A replicated array is one value on as many devices as there are, and JAX assumes without a check
that they are equal: `numpy.asarray` reads the copy of the first. Here every device's own buffer is
read. What is sharded is compared among the devices that hold the same part.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from typing import Any

try:
    import jax
except ImportError as error:
    raise ImportError("agent.jax needs JAX: pip install jax") from error

from rankscope.agent import start
from rankscope.agent.model.arrays import flat


class Replicas:
    """The devices of this process, each with a monitor.

    Args:
        parameters: a tree (mappings, lists, tuples) of arrays.
        stacked: arrays have a leading axis of the devices, one copy for each, as in loops written
            for `pmap`.
        devices: that the training runs on, of all processes; JAX's own order by default.
        step: number of steps taken before.
        **options: as those of `agent.start`.

    Attributes:
        monitors: of the devices of this process.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        *,
        stacked: bool = False,
        devices: list[Any] | None = None,
        step: int = 0,
        **options: Any,
    ) -> None:
        every = list(devices or jax.devices())
        self._stacked = stacked
        self._here = [d for d in every if d.process_index == jax.process_index()]
        self.monitors: list[Any] = []
        for device in self._here:
            if self.monitors:
                options["run"] = self.monitors[0].run
            held = flat(parameters)
            parts = {name: self._part(array, device) for name, array in held.items()}
            # Parts have to be declared before anything is recorded for them.
            first = None if any(parts.values()) else self._read(parameters, device)
            monitor = start(
                step=step,
                rank=every.index(device),
                world_size=len(every),
                parameters=first,
                **options,
            )
            for name, part in parts.items():
                if part:
                    monitor.replicas(part, glob.escape(name))
            self.monitors.append(monitor)

    def step(self, **values: Any) -> None:
        """Ends a step on all devices.

        Args:
            **values: as for `monitor.step`; of arrays on several devices each gets its own part,
                what is the same everywhere goes to all.
        """
        for device, monitor in zip(self._here, self.monitors, strict=True):
            monitor.step(**{name: self._own(value, device) for name, value in values.items()})

    def log(self, **scalars: Any) -> None:
        """As `monitor.log`, on all devices."""
        for device, monitor in zip(self._here, self.monitors, strict=True):
            monitor.log(**{name: self._own(value, device) for name, value in scalars.items()})

    def close(self) -> None:
        """As `monitor.close`, on all devices."""
        for monitor in self.monitors:
            monitor.close()

    def _own(self, value: Any, device: Any) -> Any:
        if isinstance(value, Mapping):
            return self._read(value, device)
        held = self._buffer(value, device)
        return held.reshape(()) if getattr(held, "size", 0) == 1 else held

    def _read(self, tree: Mapping[str, Any], device: Any) -> Callable[[], Mapping[str, Any]]:
        """The buffers of one device, read where they are asked for: at sampled steps."""
        return lambda: {name: self._buffer(array, device) for name, array in flat(tree).items()}

    def _buffer(self, array: Any, device: Any) -> Any:
        """What one device holds of an array; the whole of what is not on it."""
        for shard in getattr(array, "addressable_shards", ()):
            if shard.device == device:
                return shard.data[0] if self._stacked and shard.data.ndim else shard.data
        return array

    def _part(self, array: Any, device: Any) -> str:
        """Which part of an array a device holds; empty for the whole of it."""
        for shard in getattr(array, "addressable_shards", ()):
            if shard.device == device:
                index = shard.index[1:] if self._stacked else shard.index
                cut = [
                    f"{dimension}:{s.start or 0}-{s.stop}"
                    for dimension, s in enumerate(index)
                    if (s.start or 0) > 0 or s.stop not in (None, array.shape[dimension])
                ]
                return " ".join(cut)
        return ""
