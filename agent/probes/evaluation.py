"""Loss and accuracy over an evaluation phase."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from rankscope.agent.dynamo import leave_alone
from rankscope.agent.hook_tables import HiddenHook, ModuleHook
from rankscope.agent.probes.classification import CLASS_INDEX_LOSSES, Hits
from rankscope.agent.probes.given import batch_size

# Losses that a `backward` may still follow, in evaluation mode.
_MAX_OPEN = 16
# What a model returns as its own loss is the loss, whatever else is computed inside.
_OUTPUT = "the model's output"


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def summed(self) -> bool: ...


class _Seen(NamedTuple):
    """A loss computed in evaluation mode.

    Attributes:
        name: of the function.
        site: where it was called: of two losses in one evaluation each has its own.
        value: None where it has several elements.
        size: samples it is of.
        summed: over the samples, not averaged.
    """

    name: str
    site: Any
    value: float | torch.Tensor | None
    size: int
    summed: bool
    hits: Hits | None


class _Sums:
    """Sums over the losses of one call site, on the device where they are there."""

    __slots__ = ("hits", "name", "plain", "samples", "weighted")

    def __init__(self, name: str) -> None:
        self.name = name
        self.plain: Any = 0.0
        self.weighted: Any = 0.0
        self.samples = 0
        self.hits: Hits | None = None

    def add(self, seen: _Seen) -> None:
        if seen.hits is not None:
            self.hits = seen.hits if self.hits is None else self.hits + seen.hits
        if seen.value is None:
            return
        weighted = seen.value * seen.size
        self.weighted = self.weighted + weighted
        self.plain = self.plain + (seen.value if seen.summed else weighted)
        self.samples += seen.size


class Evaluation:
    """What is computed in evaluation mode between two stretches of training.

    Attributes:
        seen: there is something to tell at the end.
        bare: the model returns a tensor, and so no loss of its own.
    """

    def __init__(self) -> None:
        self.seen = False
        self.bare = False
        self._sites: dict[Any, _Sums] = {}
        self._open: list[_Seen] = []
        self._trained: tuple[str, ...] = ()
        self._summed = False

    def learn(self, computed: Sequence[_Named]) -> None:
        """These losses are what training is about."""
        self._trained = tuple(c.name for c in computed)
        self._summed = any(c.summed for c in computed)

    def add(
        self,
        name: str,
        site: Any,
        given: dict[str, Any],
        output: torch.Tensor,
        judged: Hits | None,
    ) -> None:
        """A loss function has been called."""
        scores = next(iter(given.values()), None)
        alone = 1 if name in CLASS_INDEX_LOSSES else 0  # dimensions of a single sample
        size = 1
        if isinstance(scores, torch.Tensor) and scores.dim() > alone:
            size = scores.shape[0]
        value = _value(output) if output.numel() == 1 else None
        summed = given.get("reduction") == "sum"
        self._note(_Seen(name, site, value, int(size), summed, judged), output.requires_grad)

    def add_output(self, output: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """The model has returned `output`."""
        if type(output) is torch.Tensor:
            self.bare = True
            return
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if type(loss) is torch.Tensor and loss.numel() == 1:
            size = batch_size(args, kwargs)
            seen = _Seen(_OUTPUT, _OUTPUT, _value(loss), size, False, None)
            self._note(seen, loss.requires_grad)

    def _note(self, seen: _Seen, trainable: bool) -> None:
        if trainable:
            # Nobody has to evaluate under no_grad, and a model may be trained in evaluation mode.
            self._open.append(seen)
            if len(self._open) > _MAX_OPEN:
                self._take(self._open.pop(0))
            else:
                self.seen = True
        else:
            self._take(seen)

    def _take(self, seen: _Seen) -> None:
        self.seen = True
        sums = self._sites.get(seen.site)
        if sums is None:
            sums = self._sites[seen.site] = _Sums(seen.name)
        sums.add(seen)

    def trained_on(self) -> None:
        """`backward` was called: what is open was no evaluation."""
        if self._open:
            self._open.clear()
            self.seen = bool(self._sites)

    def settle(self) -> None:
        """The model runs again: what is open was not trained on."""
        for seen in self._open:
            self._take(seen)
        self._open.clear()

    def end(self) -> dict[str, float | torch.Tensor]:
        """The means, and a new beginning."""
        self.settle()
        sites, self._sites, self.seen = list(self._sites.values()), {}, False
        means: dict[str, float | torch.Tensor] = {}
        with_loss = [s for s in sites if s.samples]
        chosen = self._chosen(with_loss)
        if chosen is not None:
            # A sum is divided by its samples, unless the sum is what training reports.
            total = chosen.weighted if self._summed else chosen.plain
            means["eval/loss"] = total / chosen.samples
        judged = [s for s in sites if s.hits is not None]
        best = chosen if chosen in judged else self._chosen(judged)
        if best is not None and best.hits is not None:
            ratio = best.hits.ratio()
            if ratio is not None:
                means["eval/accuracy"] = ratio
        return means

    def _chosen(self, sites: list[_Sums]) -> _Sums | None:
        for name in (_OUTPUT, *self._trained):
            for sums in sites:
                if sums.name == name:
                    return sums
        return sites[0] if sites else None


class OutputHook(ModuleHook):
    """Forward hook of the root module during evaluation."""

    def __init__(self, listener: Any = None, module: torch.nn.Module | None = None) -> None:
        self._listener = None if listener is None else weakref.ref(listener)
        self._handle: HiddenHook | None = None
        if module is not None:
            self._handle = HiddenHook(module.register_forward_hook(self, with_kwargs=True))

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any
    ) -> None:
        """Tells the probe, which takes the hook off once it knows what the model returns."""
        listener = None if self._listener is None else self._listener()
        if listener is None or torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        listener.model_returned(output, args, kwargs)

    def remove(self) -> None:
        """Takes the hook back."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


leave_alone(OutputHook.__call__)


def _value(tensor: torch.Tensor) -> float | torch.Tensor:
    if tensor.is_cpu:
        return tensor.item()
    return tensor.detach().reshape(()).double()
