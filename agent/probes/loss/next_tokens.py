"""Whether a model that is to predict the next token has been given it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rankscope.agent.model.facts import held
from rankscope.agent.model.tensors import number
from rankscope.agent.probes.base import StepFacts
from rankscope.agent.probes.data.given import tensors_in
from rankscope.agent.probes.tables import readable

# Places of a sequence that are judged beside its last one, sequences of a batch, and scores
# of all of these together.
_PLACES, _SEQUENCES, _SCORES = 64, 64, 1 << 22
# Samples that a mean is of: of 16 with 16 sequences each it errs by an eighth of a nat or less.
_MEANS = 16
_SHORTEST = 4
# Places by which targets may lie ahead of the inputs, and targets that count, at the least: of a
# few, it is chance.
_DISTANCES, _FEWEST = (1, 2, 3), 16
# Share of the sequences that have to have a target at each place that is judged.
_REACHED = 0.5


class NextTokens:
    """`next_token_seen`, `next_token_unseen` and `next_token_distance`, of losses over sequences.

    Of targets that are the inputs some places on, `next_token_distance` is how many: 1 to 3, the
    smallest of the step's losses; -1 where any of these has other targets.

    Where it is 1, the target of each place of a sequence is the input of the next one, but for the
    last place, whose target the model is given nowhere. A model that looks at later places
    (attention without a causal mask) knows all but that one. `next_token_unseen` is the mean cross
    entropy at the last place, `next_token_seen` that at the one of up to 64 earlier places where it
    is largest; both over up to 64 sequences of each loss and about 16 samples, -1 where the targets
    are something else, or half of the sequences end before (`ignore_index`). A model that does not
    look ahead errs at the last place as it does elsewhere. Neither is above what guessing costs.

    Of losses in training by `cross_entropy`, of sequences of 4 tokens or more, at steps where the
    tier `full` is due: it costs a softmax over at most 4 million scores.
    """

    def __init__(self) -> None:
        self._tokens: torch.Tensor | None = None
        self._means: torch.Tensor | None = None
        self._count = 0
        self._shifted: list[torch.Tensor] = []
        self._distances: list[torch.Tensor] = []

    def given(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Takes what the model is given."""
        first = next(tensors_in(args, kwargs), None)
        self._tokens = None
        if first is None or first.dim() != 2 or not first.numel() or not readable(first):
            return
        if first.dtype in (torch.int32, torch.int64) and first.shape[1] >= _SHORTEST:
            self._tokens = held(first)

    def add(self, name: str, given: Mapping[str, Any]) -> None:
        """Takes what the loss function of that name was called with."""
        tokens, scores, target = self._tokens, given.get("input"), given.get("target")
        if name != "cross_entropy" or tokens is None:
            return
        if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
            return
        if not (readable(scores) and readable(target)) or target.is_floating_point():
            return
        if not target.device == scores.device == tokens.device:
            return
        rows, length = tokens.shape
        # Losses may leave out the last place, whose target is not known.
        if target.numel() in (rows * length, rows * (length - 1)):
            with torch.no_grad():
                wanted = target.reshape(rows, -1)
                self._distances.append(_distance(tokens, wanted, counted(wanted, given)))
        if target.numel() != tokens.numel():
            return
        if scores.dim() == 2 and len(scores) == rows * length:
            scores = scores.view(rows, length, -1)
        elif scores.dim() == 3 and target.shape == tokens.shape:
            scores = scores.transpose(1, 2)
        else:
            return
        with torch.no_grad():
            wanted = target.reshape(rows, length)
            self._judge(tokens, scores.detach(), wanted, counted(wanted, given))

    def end(self, facts: StepFacts) -> None:
        """Reports the means of the step."""
        self._tokens = None
        shifted, self._shifted = self._shifted, []
        distances, self._distances = self._distances, []
        if distances:
            facts.scalars["next_token_distance"] = number(torch.stack(distances).min())
        if shifted and self._means is not None:
            all_shifted = torch.stack(shifted).all()
            none = torch.full_like(self._means[0], -1.0)
            for series, error in (
                ("next_token_seen", self._means[1:].amax()),
                ("next_token_unseen", self._means[0]),
            ):
                facts.scalars[series] = number(torch.where(all_shifted, error, none))

    def _judge(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        target: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        length = tokens.shape[1]
        step = -(-(length - 1) // _PLACES)
        # The last one, and others back from the one before it. Computed where the tensors are: a
        # list of places would be sent there, and waited for.
        back = torch.arange(-1, (length - 2) // step + 1, device=tokens.device) * step
        places = (length - 2 - back).clamp_max(length - 1)
        most = min(_SEQUENCES, _SCORES // (len(places) * scores.shape[2]))
        if not most:
            return
        tokens, scores = tokens[:most], scores[:most]
        target, valid = target[:most], valid[:most]
        shifted = ((target[:, :-1] == tokens[:, 1:]) | ~valid[:, :-1]).all()
        # Places that few sequences reach are judged by few.
        there = valid[:, places].float()
        self._shifted.append(shifted & (there.mean(0) >= _REACHED).all())
        chosen = target[:, places].clamp_min(0).unsqueeze(2)
        wrong = -scores[:, places].float().log_softmax(2).gather(2, chosen).squeeze(2)
        # A model that errs by more than guessing costs knows nothing of a target: scores that have
        # blown up are no sign that it sees more at one place than at another.
        guessing = math.log(scores.shape[2])
        errors = ((wrong * there).sum(0) / there.sum(0).clamp_min(1)).clamp_max(guessing)
        if self._means is None or self._means.shape != errors.shape:
            self._means, self._count = errors, 1
            return
        self._count = min(self._count + 1, _MEANS)
        self._means = self._means + (errors - self._means) / self._count


def _distance(tokens: torch.Tensor, target: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """By how many places targets are the inputs' later ones, float32 []; -1 for no such number.

    Args:
        tokens: int64 [N, L].
        target, valid: int64 and bool [N, L] or [N, L - 1].
    """
    found = torch.full((), -1.0, device=tokens.device)
    # From the largest on, so that the smallest is what remains; that of 0 is another matter.
    for places in (*reversed(_DISTANCES), 0):
        ahead = tokens[:, places:]
        upto = min(ahead.shape[1], target.shape[1])
        wanted, counts = target[:, :upto], valid[:, :upto]
        alike = ((wanted == ahead[:, :upto]) | ~counts).all() & (counts.sum() >= _FEWEST)
        # What is the same everywhere is as far ahead as one likes.
        largest = torch.where(counts, wanted, -1).amax()
        varied = (counts & (wanted != largest)).any()
        found = torch.where(alike & varied, float(places) if places else -1.0, found)
    return found


def counted(target: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Whether each target of a `cross_entropy` counts, bool like the targets: not padding."""
    ignored: int = given.get("ignore_index", -100)
    return (target >= 0) & (target != ignored)
