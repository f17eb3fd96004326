"""Tensors that get no gradient: what was seen of them, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, percent, sentences
from rankscope.server.window import Window


@dataclass(slots=True)
class Cut:
    """Tensors that get no gradient: how many, how many there are, how many was usual, and which.

    Attributes:
        share: of the elements that the optimizer is to train, those in tensors that never had one.
        barred: tensors of modules that are called where no gradient is recorded.
        computed: whether the backward pass did compute gradients meanwhile.
        zeros: whether all of them have a gradient, which is exactly zero.
    """

    missing: int
    of: int
    usual: int
    names: tuple[str, ...] = ()
    before: str = ""
    share: float = 0.0
    barred: int = 0
    computed: bool = False
    zeros: bool = False


def cut_finding(episode: Episode[Cut], window: Window) -> Finding:
    """Of tensors that have got no gradient since some step."""
    facts, step = episode.facts, episode.first_step
    amount = facts.missing - facts.usual
    of = f" of {facts.of}" if facts.of else ""
    verb = agree(amount, "has")
    whole = bool(facts.of) and facts.missing >= facts.of
    lost = whole and facts.computed
    if whole:
        title = f"No parameter has got a gradient since step {step}"
    else:
        title = f"{count(amount, 'tensor')}{of} {verb} got no gradient since step {step}"
    names = listing([f"`{name}`" for name in facts.names], most=4)
    where = (
        f"They are all that comes before `{facts.before}`, whose input carries no gradient."
        if facts.before
        else ""
    )
    return episode.finding(
        kind="layer.dead",
        severity="critical" if facts.of and 2 * facts.missing > facts.of else "warning",
        title=title,
        ranks=tuple(int(r) for r in window.ranks),
        tensors=facts.names,
        stage="local_gradient",
        cause=sentences(
            f"Up to step {step} at most {count(facts.usual, 'tensor')} had no gradient, since then "
            f"{count(facts.missing, 'tensor')}{of}{': ' if names else ''}{names}.",
            where,
            "The backward pass does compute gradients: they are lost between it and the step, as "
            "by `zero_grad()` after `backward()`, a scale or clipping bound of 0, or an average "
            "that is not written back."
            if lost
            else "Something between them and the loss is detached (`detach()`, `.data`, `no_grad`, "
            "a conversion to numpy and back), not used any more, or multiplied by 0 (a mask, dead "
            "units).",
        ),
        remedy=(
            f"Look at what the loop does differently from step {step} on, and print the gradient's "
            "norm right after `backward()` and right before `step()`."
            if lost
            else f"Look at what changes at step {step}: a schedule, a switch of phases, a branch. "
            "In the forward pass, print `requires_grad` of what each layer is given: the first one "
            "that is False comes after the cut. If it is meant, set `requires_grad` of these "
            "parameters to False, which also saves their part of the backward pass."
        ),
        evidence={
            "missing": facts.missing,
            "of": facts.of,
            "usual": facts.usual,
            **({"lost": True} if lost else {}),
        },
    )


def never_finding(episode: Episode[Cut], window: Window, *, large_part: float) -> Finding:
    """Of tensors that never had a gradient.

    Args:
        large_part: share of the trained elements from which on they are a part of the model.
    """
    facts = episode.facts
    large = facts.share >= large_part
    of = f" of {facts.of}" if facts.of else ""
    names = listing([f"`{name}`" for name in facts.names], most=4)
    return episode.finding(
        kind="layer.dead",
        key="never",
        severity="warning" if large or facts.barred else "info",
        title=f"{count(facts.missing, 'tensor')}{of} never had a gradient",
        ranks=tuple(int(r) for r in window.ranks),
        tensors=facts.names,
        stage="local_gradient",
        cause=sentences(
            f"At {count(episode.seen, 'observation')} from the beginning on at least "
            f"{count(facts.missing, 'tensor')}{of} had no "
            f"gradient{': ' if names else ''}{names}.",
            "Their gradients are exactly 0: all units behind them are inactive (of a ReLU, with "
            "biases far below 0), a weight, mask or factor behind them is 0, they are multiplied "
            "with each other and both begin at 0, so that neither can leave it, or they are not "
            "used, and `zero_grad(set_to_none=False)` leaves zeros."
            if facts.zeros
            else "They are not used, or cut off from the loss (`detach`, `no_grad`, a way through "
            "numbers that are no tensors).",
            f"That is {percent(facts.share)} of what the optimizer is to train: it stays as it was "
            "initialised."
            if large
            else "",
            f"Modules that hold {facts.barred:,} of them are called in each training pass under "
            "`torch.no_grad`: the model works with what they give, and they are not trained."
            if facts.barred
            else "",
        ),
        remedy=(
            "Print what each layer behind them gives to one batch: the first that gives 0 or the "
            "same number for everything stops it. Begin with He's or Xavier's weights and biases "
            "of 0, or put LeakyReLU in the place of ReLU."
            if facts.zeros
            else "If they are not to be trained, set `requires_grad` to False. Else look for what "
            "detaches them from the loss."
        ),
        evidence={
            "missing": facts.missing,
            "of": facts.of,
            "usual": 0,
            "elements_share": facts.share,
            "called_without_gradient": facts.barred,
            **({"zeros": True} if facts.zeros else {}),
        },
    )
