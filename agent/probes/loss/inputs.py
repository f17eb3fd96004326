"""What loss functions are given: scores of the wrong kind, and shapes that do not match."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from rankscope.agent.model.tensors import number
from rankscope.agent.probes.base import StepFacts
from rankscope.agent.probes.tables import readable

# Numbers of which scores and sizes are judged. Rows of scores that sum to 1 by chance to a
# thousandth do not come by the dozen, and a root mean square of that number errs by 1 %.
_FEW = 4096
_FEW_ROWS = 4
# What the sum of half-precision probabilities is off by: 2^-11 of each of them.
_ROUNDING = 4e-3

# From a loss down to its differences: the operations that lie between, how many of them one below
# the other, and how many in all. A likelihood with a scale of its own has some eight.
_DEEPEST, _MOST_NODES = 8, 24
_DIFFERENCE = "SubBackward0"
_ABOVE = frozenset(
    f"{name}Backward0"
    for name in (
        *("Mean", "Sum", "Pow", "Abs", "Mul", "Div", "Sqrt"),
        *("Add", "Neg", "Exp", "Log", "Clamp"),
    )
)
# What outputs come from: layers and activations, and a row or column of them.
_OUTPUTS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Addmm", "Mm", "Relu", "Sigmoid", "Tanh", "Softplus", "Squeeze", "Select"),
        *("Add", "Mul", "Exp"),
    )
) | {"SqueezeBackward1", "SqueezeBackward2"}

# What leaves the numbers as they are.
_SHAPED = frozenset(
    f"{name}Backward{number}"
    for name in ("Squeeze", "Unsqueeze", "View", "UnsafeView", "Reshape", "Select", "Slice")
    for number in range(3)
)

# Errors that are one operation.
_ERRORS = frozenset(f"{name}Backward0" for name in ("MseLoss", "SmoothL1Loss", "HuberLoss"))
_MEANS = frozenset(f"{name}Backward{number}" for name in ("Mean", "Sum") for number in range(2))
_BINARY = frozenset(("binary_cross_entropy", "binary_cross_entropy_with_logits"))
_ELEMENTWISE = frozenset(("huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss"))


class LossInputs:
    """`scores_...`, `labels_outside`, `loss_...`, `output_scale`, `target_size`.

    Of losses in training, at steps where the tier `signals` is due; means over the step's losses.
    Costs some ten microseconds a loss, over up to 4,096 numbers of what it is given.

    `scores_softmaxed` is 1 where `cross_entropy` or `binary_cross_entropy_with_logits`, which take
    the softmax (the sigmoid) themselves, are given probabilities (what a sigmoid made), and where
    `nll_loss` is given the logarithm of a softmax of a softmax, else 0;
    `scores_unnormalised` is 1 where `nll_loss`, which takes logarithms of probabilities, is given
    something else; `scores_positive` where `kl_div` is, of which no number is below 0.
    `loss_negated` is 1 where a backward pass begins at the negative of a mean or sum of squared or
    absolute differences; 0 at other passes from then on, and not posted before.
    `loss_subtracted` is the same of a sum, or difference, of several terms of which one, a loss of
    torch's with targets that carry no gradient, is taken away.
    `targets_blank` is 1 where a target of `ctc_loss` holds the blank, which stands for none.
    `labels_outside` is 1 where a binary cross entropy is given labels below 0 or above 1, which
    is no mistake where single elements of the loss are taken out again (`reduction="none"`).
    `label_smoothing` is that of a `cross_entropy` which has one.
    `loss_broadcast` says of losses of two tensors of one shape (`mse_loss` and the like) how many
    times as many differences were taken as the larger one has elements: [N, 1] and [N] make N^2;
    and of losses written by hand how many times as many as there are outputs.
    `output_scale` is, of the same losses, the root mean square of the outputs over that of the
    targets, which is `target_size`.
    `loss_classes` is how many classes a `cross_entropy` chooses among, from the step on at which it
    is another number than at first: among the keys of a queue that fills.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[float | torch.Tensor]] = {}
        self._usual = 0
        self._vary = False
        self._negated = self._subtracted = False

    def add(self, name: str, given: Mapping[str, Any]) -> None:
        """Takes what the loss function of that name was called with."""
        if name == "ctc_loss":
            with torch.no_grad():
                self._note("targets_blank", _hold_blanks(given))
            return
        scores, target = given.get("input"), given.get("target")
        if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
            return
        if not scores.numel() or not scores.is_floating_point() or not readable(scores):
            return
        with torch.no_grad():
            if name in _ELEMENTWISE:
                self._elementwise(scores.detach(), target.detach())
            elif name == "cross_entropy":
                self._note("scores_softmaxed", _are_probabilities(scores.detach()))
                self._count(int(scores.shape[min(scores.dim(), 2) - 1]))
                if smoothing := given.get("label_smoothing"):
                    self._found.setdefault("label_smoothing", []).append(float(smoothing))
            elif name == "nll_loss":
                self._note("scores_unnormalised", _are_no_logarithms(scores.detach()))
                self._found.setdefault("scores_softmaxed", []).append(_has_two_softmaxes(scores))
            elif name == "kl_div":
                self._note("scores_positive", _are_positive(scores.detach()))
            elif name in _BINARY:
                if name == "binary_cross_entropy_with_logits":
                    self._found.setdefault("scores_softmaxed", []).append(_has_sigmoid(scores))
                if given.get("reduction") in ("mean", "sum") and given.get("weight") is None:
                    self._note("labels_outside", _are_outside(target.detach()))

    def add_root(self, node: Any) -> None:
        """Takes the node that a backward pass began from: of a loss written by hand."""
        negated = _is_negated_error(node)
        self._negated |= negated
        if self._negated:
            self._found.setdefault("loss_negated", []).append(float(negated))
        times = _times_broadcast(node)
        if times is not None:
            self._found.setdefault("loss_broadcast", []).append(times)

    def add_terms(self, signs: Collection[int]) -> None:
        """Takes the signs with which losses count in what a backward pass is about to begin from.

        Args:
            signs: 1 or -1; empty where it is no sum, or nothing is known of its terms.
        """
        negative = -1 in signs
        self._subtracted |= negative
        if self._subtracted and signs:
            self._found.setdefault("loss_subtracted", []).append(float(negative))

    def end(self, facts: StepFacts) -> None:
        """Reports the means of the step."""
        for series, values in self._found.items():
            facts.scalars[series] = sum(values) / len(values)
        self._found.clear()

    def _count(self, classes: int) -> None:
        self._usual = self._usual or classes
        self._vary |= classes != self._usual
        if self._vary:
            self._found.setdefault("loss_classes", []).append(float(classes))

    def _note(self, series: str, value: torch.Tensor | None) -> None:
        if value is not None:
            self._found.setdefault(series, []).append(number(value))

    def _elementwise(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        if not target.numel() or not readable(target):
            return
        try:
            shape = torch.broadcast_shapes(outputs.shape, target.shape)
        except RuntimeError:
            return  # the loss function has its own say on that
        times = 1.0
        if outputs.dim() != target.dim():  # else the trainer has made room for each of them
            times = math.prod(shape) / max(outputs.numel(), target.numel())
        self._found.setdefault("loss_broadcast", []).append(times)
        if target.is_floating_point() and target.device == outputs.device:
            sizes = [_few(t).float().square().mean() for t in (outputs, target)]
            self._note("output_scale", (sizes[0] / sizes[1].clamp_min(1e-30)).sqrt())
            self._note("target_size", sizes[1].sqrt())


def _times_broadcast(node: Any) -> float | None:
    """How many times as many differences a loss is made of as there are outputs.

    Follows what a mean or sum is made of, element by element, down to the first differences of an
    output and what carries no gradient: [N, N] where the outputs are [N, 1] or [N]. What has been
    given another dimension on purpose (`unsqueeze`), and a difference of two outputs, is a loss
    over pairs.

    Returns:
        The largest of all such differences; None where there is none.
    """
    found: list[float] = []
    level, seen = [node], 0
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for one in level:
            seen += 1
            if seen > _MOST_NODES:
                break
            children = [pair for pair in one.next_functions if pair[0] is not None]
            name = one.name()
            if name == _DIFFERENCE and len(children) == 1:
                times = _times(one, *children[0])
                found += [] if times is None else [times]
            elif name in _ABOVE:
                below += [child for child, _ in children]
        level = below
    return max(found, default=None)


def _times(difference: Any, child: Any, place: int) -> float | None:
    """The same of one difference, of an output that comes in at a place of the node below."""
    shapes, below = (getattr(n, "_input_metadata", None) for n in (difference, child))
    if not shapes or not below or child.name() not in _OUTPUTS:
        return None
    whole, outputs = tuple(shapes[0].shape), tuple(below[place].shape)
    if not outputs or math.prod(outputs) == 0:
        return None
    square = len(whole) == 2 and whole[0] == whole[1] == math.prod(outputs) > 1
    return float(whole[0]) if square else 1.0


def _is_negated_error(node: Any) -> bool:
    """Whether a loss is the negative of an error: of a mean or sum of squares, or of absolutes."""
    if node.name() != "NegBackward0":
        return False
    for _ in range(_DEEPEST):
        below = [child for child, _ in node.next_functions if child is not None]
        if len(below) != 1:
            return False
        node = below[0]
        name = node.name()
        if name in _ERRORS:
            return True
        if name in ("PowBackward0", "AbsBackward0"):
            odd = name == "PowBackward0" and node._saved_exponent % 2
            inner = next((child for child, _ in node.next_functions if child is not None), None)
            return not odd and inner is not None and inner.name() == _DIFFERENCE
        if name not in _MEANS:
            return False
    return False


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """The first numbers, up to a limit, of the first rows."""
    if tensor.numel() <= _FEW or tensor.dim() == 0:
        return tensor
    rows = max(1, _FEW * tensor.shape[0] // tensor.numel())
    return tensor[:rows]


def _rows(scores: torch.Tensor) -> torch.Tensor | None:
    """Some of the distributions, float32 [N, C]; None where there is no choice between classes.

    Of scores with further dimensions (pixels, places in a text) those of the first place.
    """
    if scores.dim() == 0 or scores.shape[scores.dim() > 1] < 2:
        return None
    rows = scores.unsqueeze(0) if scores.dim() == 1 else scores
    for dimension in range(2, rows.dim()):
        rows = rows.narrow(dimension, 0, 1)
    rows = rows.flatten(1)
    return rows[: max(_FEW_ROWS, _FEW // rows.shape[1])].float()


def _are_probabilities(scores: torch.Tensor) -> torch.Tensor | None:
    rows = _rows(scores)
    if rows is None:
        return None
    off = (rows.sum(1) - 1).abs().amax()
    if scores.dim() == 2 and len(rows) == len(scores) > 1:
        # Taken over the samples instead of the classes.
        off = torch.minimum(off, (rows.sum(0) - 1).abs().amax())
    return ((rows.amin() >= 0) & (off < _ROUNDING)).float()


def _are_no_logarithms(scores: torch.Tensor) -> torch.Tensor | None:
    rows = _rows(scores)
    if rows is None:
        return None
    # Of logarithms of probabilities this is 0; rounding of large ones is relative.
    off = torch.logsumexp(rows, 1).abs().amax()
    return (off > 10 * _ROUNDING).float()


def _are_positive(scores: torch.Tensor) -> torch.Tensor:
    """Whether they are what logarithms of probabilities cannot be: above 0, and none below."""
    few = _few(scores).float()
    return ((few.amin() >= 0) & (few.amax() > _ROUNDING)).float()


def _are_outside(labels: torch.Tensor) -> torch.Tensor | None:
    """Whether some are no probabilities."""
    if not labels.numel() or not readable(labels):
        return None
    few = _few(labels).float()
    return ((few.amin() < -_ROUNDING) | (few.amax() > 1 + _ROUNDING)).float()


def _hold_blanks(given: Mapping[str, Any]) -> torch.Tensor | None:
    """Whether a target of `ctc_loss` holds the blank; what lies behind its end does not count."""
    targets, lengths = given.get("targets"), given.get("target_lengths")
    if not isinstance(targets, torch.Tensor) or not targets.numel() or not readable(targets):
        return None
    blanks = targets == given.get("blank", 0)
    if targets.dim() == 2:
        lengths = torch.as_tensor(lengths, device=targets.device)
        if lengths.shape != targets.shape[:1]:
            return None
        blanks &= torch.arange(targets.shape[1], device=targets.device) < lengths.unsqueeze(1)
    elif targets.dim() != 1:
        return None
    found: torch.Tensor = blanks.any().float()
    return found


def _has_sigmoid(scores: torch.Tensor) -> float:
    """1 where a sigmoid made the scores, before no more than another shape of them."""
    node = _maker(scores.grad_fn)
    return float(node is not None and node.name() == "SigmoidBackward0")


def _has_two_softmaxes(logarithms: torch.Tensor) -> float:
    """1 where the logarithm of a softmax was taken of what is a softmax already."""
    node = _maker(logarithms.grad_fn)
    if node is None or node.name() != "LogSoftmaxBackward0":
        return 0.0
    inner = _maker(node.next_functions[0][0])
    return float(inner is not None and inner.name() == "SoftmaxBackward0")


def _maker(node: Any) -> Any:
    """The node that has made the numbers, below those that only give them another shape."""
    for _ in range(_DEEPEST):
        if node is None or node.name() not in _SHAPED:
            break
        node = node.next_functions[0][0]
    return node
