"""Lightning: a callback that attaches to what the strategy has set up.

from rankscope import agent
trainer = L.Trainer(callbacks=[agent.lightning.RankscopeCallback()])
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise ImportError("agent.lightning needs Lightning: pip install lightning") from error

from rankscope.agent import attach


class RankscopeCallback(Callback):
    """Watches `trainer.fit` on every rank.

    Args:
        optimizer: which of the module's optimizers takes the steps of the run, where there are
            several.
        **options: as those of `agent.attach`.

    Attributes:
        monitor: of this rank, while it trains; None before and after.
    """

    def __init__(self, *, optimizer: int = 0, **options: Any) -> None:
        super().__init__()
        self.monitor: Any = None
        self._optimizer = optimizer
        self._options = options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches: the model is wrapped now, and a checkpoint restored."""
        chosen = trainer.optimizers[self._optimizer]
        # The optimizer itself says how many steps were taken before: Lightning's `global_step`
        # counts those of all optimizers together.
        self.monitor = attach(trainer.model or pl_module, chosen, **self._options)
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes over by what losses are divided: a scheduler may change it between epochs."""
        if self.monitor is not None:
            self.monitor.accumulation(divided_by=int(trainer.accumulate_grad_batches))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the monitor with the error."""
        if self.monitor is not None:
            self.monitor.__exit__(type(exception), exception, exception.__traceback__)
            self.monitor = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the monitor."""
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
