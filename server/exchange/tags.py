"""Which of a run's metrics a tag of another tool is: `train/loss`, `Loss/train`, `epoch_loss`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from rankscope.agent.wire import MAX_NAME_LENGTH, Column

# Words that say how and when something was taken, not what.
_AROUND = frozenset(
    "train training epoch step batch iter iteration iterations vs metric metrics scalars total avg "
    "average mean running minibatch global log logs".split()
)
_EVALUATION = frozenset("val valid validation eval evaluation test testing dev holdout".split())
_OPTIMIZERS = frozenset(
    "adam adamw sgd rmsprop adagrad adamax nadam radam lamb lars lion adafactor adadelta".split()
)
_MEANT = {
    "loss": "loss",
    "lr": "lr",
    "learning rate": "lr",
    "learningrate": "lr",
    "accuracy": "accuracy",
    "acc": "accuracy",
    "acc1": "accuracy",
    "top1": "accuracy",
    "top 1": "accuracy",
    "acc top1": "accuracy",
    "top1 acc": "accuracy",
    "binary accuracy": "accuracy",
    "categorical accuracy": "accuracy",
    "sparse categorical accuracy": "accuracy",
    # Trainers log what clipping by norm returns: the norm before it.
    "grad norm": "grad_norm_preclip",
    "gradnorm": "grad_norm_preclip",
    "gradient norm": "grad_norm_preclip",
    "grad 2 norm": "grad_norm_preclip",
    "grad 2 0 norm": "grad_norm_preclip",
}
_EVALUATED = ("loss", "accuracy")
# Ours, which stay what they are.
_OWN = frozenset(
    "loss accuracy grad_norm grad_norm_preclip grad_norm_local lr step_seconds samples_per_second "
    "eval/loss eval/accuracy".split()
)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tag that could be a metric, with what decides between several."""

    tag: str
    points: int
    last_step: int


def names(ranks: Mapping[int, Mapping[str, Column]]) -> dict[str, str]:
    """Tag -> name of the metric, for all tags of a log; what is not known keeps its name.

    Where several tags are one metric (a loss of each step and its mean of each epoch), the one with
    most points is it. Of evaluations it is then the one whose steps go as far as the loss's: some
    tools count epochs in one tag and steps in another. The others keep their names.
    """
    candidates: dict[str, list[_Candidate]] = {}
    extents: dict[str, _Candidate] = {}
    for columns in ranks.values():
        for tag, column in columns.items():
            known = extents.get(tag)
            points, last = len(column.steps), int(column.steps[-1])
            if known is not None:
                points, last = points + known.points, max(last, known.last_step)
            extents[tag] = _Candidate(tag, points, last)
    for tag, candidate in sorted(extents.items()):
        if (name := meant(tag)) is not None:
            candidates.setdefault(name, []).append(candidate)
    chosen: dict[str, str] = {}
    reach = 0
    for name in sorted(candidates, key=lambda name: (name != "loss", name)):
        best = _best(name, candidates[name], reach)
        chosen[best.tag] = name
        if name == "loss":
            reach = best.last_step
    taken = set(chosen.values())
    return {tag: chosen.get(tag) or _own_name(tag, taken) for tag in sorted(extents)}


def _best(name: str, several: list[_Candidate], reach: int) -> _Candidate:
    return min(
        several,
        key=lambda c: (c.tag != name, -c.points, abs(c.last_step - reach), len(c.tag), c.tag),
    )


def meant(tag: str) -> str | None:
    """The metric that a tag is, taken by itself; None: none of those known by name."""
    if tag in _OWN:
        return tag
    words = [w for w in re.split(r"[^a-z0-9]+", _split_humps(tag).lower()) if w]
    evaluated = any(word in _EVALUATION for word in words)
    left = [word for word in words if word not in _AROUND and word not in _EVALUATION]
    if left[:1] == ["lr"]:
        # lr-Adam, lr-SGD/pg1: the first group's, where there are several.
        left = [w for w in left if w not in _OPTIMIZERS and not re.fullmatch(r"pg\d+|group|\d+", w)]
    name = _MEANT.get(" ".join(left))
    if name is None or not evaluated:
        return name
    return f"eval/{name}" if name in _EVALUATED else None


def _split_humps(tag: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", tag)


def _own_name(tag: str, taken: set[str]) -> str:
    """The tag itself, unless a metric is called so, or it is too long; different ones stay so."""
    name = tag if tag not in taken else f"logged/{tag}"
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = blake2b(tag.encode("utf-8", "replace"), digest_size=8).hexdigest()
    return f"{name[: MAX_NAME_LENGTH - len(digest) - 1]}~{digest}"
