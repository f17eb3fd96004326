"""Transformers' Trainer: a callback that attaches to what it trains.

from rankscope import agent
trainer = Trainer(..., callbacks=[agent.transformers.RankscopeCallback()])
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("agent.transformers needs Transformers: pip install transformers") from error

from rankscope.agent import attach


class RankscopeCallback(TrainerCallback):
    """Watches `trainer.train` on every rank.

    Args:
        **options: as those of `agent.attach`.

    Attributes:
        monitor: of this rank, while it trains; None before and after.
    """

    def __init__(self, **options: Any) -> None:
        self.monitor: Any = None
        self._options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attaches: the optimizer has been prepared, and a checkpoint restored."""
        optimizer = kwargs["optimizer"]
        # Accelerate wraps it in what has the interface of an optimizer and nothing of its state.
        inner = getattr(optimizer, "optimizer", optimizer)
        self.monitor = attach(kwargs["model"], inner, step=state.global_step, **self._options)
        # Of each micro-batch the trainer differentiates its part of what it reports: the loss over
        # their number, or the sum over tokens by the number of tokens in all of them.
        self.monitor.accumulation(summed=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What `compute_metrics` came to: the agent sees losses by itself."""
        if self.monitor is not None:
            found = {
                f"eval/{name.removeprefix('eval_')}": value
                for name, value in (kwargs.get("metrics") or {}).items()
                if isinstance(value, int | float) and name.startswith("eval_")
            }
            self.monitor.log(**found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the monitor."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
