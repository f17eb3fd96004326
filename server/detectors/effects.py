"""What one alert does to others: how a line of that table is written."""

from __future__ import annotations

from dataclasses import dataclass

# Onsets that are reported by statistics, or dated back, are known to about this many steps. A root
# is never said to have begun more than this after what follows from it.
BLUR = 20
# Disturbances of the loss that begin this close to each other are one episode.
EPISODE = 100
# Symptoms: how loss, accuracy, gradient, units and steps behave, and not what is wrong with
# what they are made of. What one of them does ends with it: of what goes on long after, it is no
# root that a reader could act upon, and would hide beneath something that is over what is not.
SYMPTOMS = (
    *("loss.spike", "loss.oscillating", "loss.diverging", "loss.plateau"),
    *("gradient.oscillating", "gradient.exploding", "gradient.vanishing"),
    *("layer.dead", "update.ratio", "accuracy.stalled", "batch.noise"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the table. A name that ends with a dot stands for all kinds that begin so.

    Attributes:
        why: what the one does to the other: "because ...".
        stages: stages at which the root has to have broken; empty: any.
        earliest: how many steps after the root the consequence begins at the earliest; negative:
            before it. The root has begun with its `first_step`, or after the last sample that found
            nothing wrong.
        latest: the same at the latest; None: as long as the root lasts, and until it would have
            resolved.
        same_ranks: whether they have to have a rank in common, where both name ranks.
        key: what the consequence's key begins with, where a kind has findings of several sorts.
        root_key: the same of the root's key.
        has, root_has: name of what has to be in the consequence's, the root's evidence, and to be
            true.
        same_period: the consequence's `period` has to be the root's `distance`, in steps.
    """

    root: tuple[str, ...]
    consequence: tuple[str, ...]
    why: str
    stages: tuple[str, ...] = ()
    earliest: int = 0
    latest: int | None = None
    same_ranks: bool = True
    key: str = ""
    root_key: str = ""
    has: str = ""
    root_has: str = ""
    same_period: bool = False
