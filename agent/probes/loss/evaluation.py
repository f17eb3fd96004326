"""Loss and accuracy over an evaluation phase."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from rankscope.agent.probes.data.given import batch_size
from rankscope.agent.probes.loss.added import is_added_to
from rankscope.agent.probes.loss.classification import CLASS_INDEX_LOSSES, Hits
from rankscope.agent.probes.loss.passes import Place, loops_without, place_now, site_of, stack_now
from rankscope.agent.steps.dynamo import leave_alone
from rankscope.agent.steps.hook_tables import HiddenHook, ModuleHook

# Losses that a `backward` may still follow, in evaluation mode.
_MAX_OPEN = 16
# What a model returns as its own loss is the loss, whatever else is computed inside.
_OUTPUT = "the model's output"
# First of the key of a pass that the user has named.
_NAMED = "named"
# Passes that are recorded by number.
_MOST_PASSES = 16


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def place(self) -> Any: ...

    @property
    def summed(self) -> bool: ...


class _Seen(NamedTuple):
    """A loss computed in evaluation mode.

    Attributes:
        name: of the function.
        site: where it was called: of two losses in one pass each has its own.
        stack: from where: () for what is in a named pass.
        key: of its pass.
        added: the trainer adds something to it.
        place: the innermost one in the trainer's source, as `passes.place_now` has it.
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
    stack: tuple[Place, ...]
    key: tuple[Any, ...]
    place: Any
    added: bool


class _Pass:
    """The losses of one pass."""

    __slots__ = ("key", "name", "places", "sites", "stack")

    def __init__(self, key: tuple[Any, ...], stack: tuple[Place, ...]) -> None:
        self.key = key
        self.stack = stack
        self.name = ""
        self.places: set[Any] = set()
        self.sites: dict[Any, _Sums] = {}

    def add(self, seen: _Seen) -> None:
        self.places.add(seen.place)
        sums = self.sites.get(seen.site)
        if sums is None:
            sums = self.sites[seen.site] = _Sums(seen.name)
        sums.add(seen)

    def join(self, other: _Pass) -> None:
        self.places |= other.places
        for site, sums in other.sites.items():
            if site in self.sites:
                self.sites[site].join(sums)
            else:
                self.sites[site] = sums

    @property
    def calls(self) -> int:
        """How often the loss was computed at the site where that was most often."""
        return max(sums.calls for sums in self.sites.values())


class _Sums:
    """Sums over the losses of one call site, on the device where they are there."""

    __slots__ = ("added", "calls", "hits", "name", "plain", "samples", "weighted")

    def __init__(self, name: str) -> None:
        self.name = name
        self.plain: Any = 0.0
        self.weighted: Any = 0.0
        self.samples = self.calls = 0
        self.added = False
        self.hits: Hits | None = None

    def join(self, other: _Sums) -> None:
        self.plain, self.weighted = self.plain + other.plain, self.weighted + other.weighted
        self.samples, self.calls = self.samples + other.samples, self.calls + other.calls
        self.added |= other.added
        if other.hits is not None:
            self.hits = other.hits if self.hits is None else self.hits + other.hits

    def add(self, seen: _Seen) -> None:
        self.calls += 1
        self.added |= seen.added
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

    Losses belong to passes: to the one that the user has named, else to what `passes`
    distinguishes. Each pass has means of its own, and nothing is published that may be a mixture of
    several.

    Args:
        note: reports something that a person should read, once.

    Attributes:
        seen: there is something to report at the end.
        bare: the model returns a tensor, and so no loss of its own.
        names: of the passes that the user is in, the outermost first.
    """

    def __init__(self, note: Callable[[str], None] = lambda text: None) -> None:
        self.seen = False
        self.bare = False
        self.names: list[str] = []
        self._passes: dict[tuple[Any, ...], _Pass] = {}
        self._open: list[_Seen] = []
        self._trained: tuple[str, ...] = ()
        self._summed = False
        self._terms = False
        self._places: set[Any] = set()
        self._iteration = 0  # over a DataLoader, in this phase
        self._numbers: dict[tuple[Any, ...], str] = {}
        self._note_once = note
        self._noted: set[str] = set()

    def iterated(self) -> None:
        """A new iteration over a DataLoader begins."""
        self._iteration += 1

    def learn(self, computed: Sequence[_Named], *, terms: bool) -> None:
        """These losses are what training is about.

        Args:
            computed: in the order in which they count.
            terms: they are terms of what is minimised, and none of them is all of it.
        """
        self._terms = terms
        self._places = {c.place for c in computed}
        self._trained = tuple(c.name for c in computed)
        self._summed = any(c.summed for c in computed)

    def _place(self) -> tuple[tuple[Place, ...], tuple[Any, ...], Any]:
        """Stack, key of the pass, and site of the loss that is computed now."""
        stack = stack_now()
        site = (id(stack[-1].code), stack[-1].at) if stack else None
        if self.names:
            return (), (_NAMED, self.names[-1]), site
        return stack, (site_of(stack), self._iteration), site

    def add(
        self,
        name: str,
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
        stack, key, site = self._place()
        seen = _Seen(
            name, site, value, int(size), summed, judged, stack, key, place_now(), is_added_to()
        )
        self._note(seen, output.requires_grad)

    def add_output(self, output: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """The model has returned `output`."""
        if type(output) is torch.Tensor:
            self.bare = True
            return
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if type(loss) is torch.Tensor and loss.numel() == 1:
            size = batch_size(args, kwargs)
            stack, key, _ = self._place()
            seen = _Seen(_OUTPUT, _OUTPUT, _value(loss), size, False, None, stack, key, None, False)
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
        one = self._passes.get(seen.key)
        if one is None:
            one = self._passes[seen.key] = _Pass(seen.key, seen.stack)
        one.add(seen)

    def trained_on(self) -> None:
        """`backward` was called: what is open was no evaluation."""
        if self._open:
            self._open.clear()
            self.seen = bool(self._passes)

    def settle(self) -> None:
        """The model runs again: what is open was not trained on."""
        for seen in self._open:
            self._take(seen)
        self._open.clear()

    def leave(self, name: str) -> dict[str, float | torch.Tensor]:
        """The user's pass of that name is over: its means."""
        self.settle()
        one = self._passes.pop((_NAMED, name), None)
        self.seen = bool(self._passes)
        return {} if one is None else self._means(one, f"eval/{name}/")

    def end(self, training: tuple[Place, ...] = ()) -> dict[str, float | torch.Tensor]:
        """The means, and a new beginning.

        Args:
            training: where training goes on, as `passes.stack_now`.
        """
        self.settle()
        passes, self._passes, self.seen, self._iteration = self._passes, {}, False, 0
        means: dict[str, float | torch.Tensor] = {}
        separate: list[_Pass] = []
        for one in passes.values():
            if one.key[0] == _NAMED:
                means |= self._means(one, f"eval/{one.key[1]}/")
            else:
                separate.append(one)
        # The next batch of a loader that is asked for one only has an iteration of its own.
        whole: dict[Any, _Pass] = {}
        for one in separate:
            known = whole.get(one.key[0])
            if known is not None and one.calls == 1 and known.key[1] == -1:
                known.join(one)
            elif one.calls == 1 and sum(o.key[0] == one.key[0] for o in separate) > 1:
                one.key = (one.key[0], -1)
                whole[one.key[0]] = one
            else:
                whole[one.key] = one
        certain: list[_Pass] = []
        for one in whole.values():
            if one.calls == 1 or one.key[1] > 0 or loops_without(one.stack, training) < 2:
                certain.append(one)
            else:
                self._say(
                    "an evaluation computes losses inside two loops: they may be of several data "
                    "sets or models, and their mean is not recorded; name each pass, `with "
                    'monitor.evaluating("val"):`'
                )
        return means | self._unnamed(certain, alone=len(whole) == 1)

    def _unnamed(self, passes: list[_Pass], *, alone: bool) -> dict[str, float | torch.Tensor]:
        means: dict[str, float | torch.Tensor] = {}
        turns: Counter[Any] = Counter()
        for one in passes:
            key = (one.key[0], turns[one.key[0]])
            turns[one.key[0]] += 1
            name = self._numbers.get(key)
            if name is None:
                first = alone and not self._numbers
                name = "eval/" if first else f"eval/{len(self._numbers) + 1}/"
                if len(self._numbers) >= _MOST_PASSES:
                    continue
                self._numbers[key] = name
            means |= self._means(one, name)
        if len(passes) > 1:
            self._say(
                f"an evaluation has {len(passes)} passes, which are recorded separately and by "
                'number (eval/2/loss); name them, `with monitor.evaluating("val"):`'
            )
        return means

    def _say(self, text: str) -> None:
        kind = text[:30]
        if kind not in self._noted:
            self._noted.add(kind)
            self._note_once(text)

    def _means(self, one: _Pass, prefix: str) -> dict[str, float | torch.Tensor]:
        means: dict[str, float | torch.Tensor] = {}
        sites = list(one.sites.values())
        chosen = self._chosen([s for s in sites if s.samples])
        # An evaluation with a loss of its own means that one; where it goes through the code of
        # training, or computes several, the other terms may be in it.
        apart = len(one.places) == 1 and not self._places & one.places
        if chosen is not None:
            # A sum is divided by its samples, unless the sum is what training reports.
            total = chosen.weighted if self._summed else chosen.plain
            term = chosen.added or (self._terms and not apart)
            part = f"{chosen.name}/" if term and chosen.name != _OUTPUT else ""
            means[f"{prefix}{part}loss"] = total / chosen.samples
            if part:
                self._say(
                    "the loss is a sum of terms, of which an evaluation computes "
                    f"{chosen.name}: it is recorded as {prefix}{part}loss; log the whole, "
                    '`monitor.log(**{"eval/loss": ...})`'
                )
        judged = [s for s in sites if s.hits is not None]
        best = chosen if chosen in judged else self._chosen(judged)
        if best is not None and best.hits is not None:
            ratio = best.hits.ratio()
            if ratio is not None:
                means[f"{prefix}accuracy"] = ratio
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
        """Notifies the probe, which takes the hook off once it knows what the model returns."""
        # Asked first: before torch 2.6 the reference would break a graph that may not end.
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        listener = None if self._listener is None else self._listener()
        if listener is not None:
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
