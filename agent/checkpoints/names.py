"""Which names of several checkpoints mean the same thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

# What DDP, torch.compile, FSDP and activation checkpointing put between the names of modules.
_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def unwrapped(name: str) -> str:
    """A dotted name without what wrappers put into it."""
    kept = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(kept) or name


def aligned(names: Sequence[Sequence[str]]) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    """Name by name, what each checkpoint calls it; None where it does not have it.

    Equal names belong together. Of those that are left, the ones that are equal but for wrappers'
    parts do, where that leaves no choice.

    Args:
        names: of each checkpoint, in its order.
    """
    everywhere = set(names[0]).intersection(*names[1:])
    keyed = [_keyed(own, everywhere) for own in names]
    for key in dict.fromkeys(key for own in keyed for key in own):
        yield key, tuple(own.get(key) for own in keyed)


def _keyed(names: Sequence[str], everywhere: set[str]) -> dict[str, str]:
    """Common name -> the checkpoint's own."""
    left = Counter(unwrapped(name) for name in names if name not in everywhere)
    keyed = {}
    for name in names:
        plain = unwrapped(name)
        is_clear = name not in everywhere and plain not in everywhere and left[plain] == 1
        keyed[plain if is_clear else name] = name
    return keyed
