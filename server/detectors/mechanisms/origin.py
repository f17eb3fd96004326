"""Where values that are not finite came from, as the ranks saw it before an update spread them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rankscope.server.detectors.mechanisms.wording import count, listing, ranks, sentences
from rankscope.server.window import Occurrence

# How long after the step what the ranks checked afterwards belongs to it.
FOLLOWS = 8
_KIND = "nonfinite"


def reports(events: Sequence[Occurrence]) -> list[Occurrence]:
    """Those that speak of values that are not finite."""
    return [event for event in events if event.kind == _KIND]


@dataclass(slots=True)
class Origin:
    """What the ranks reported of one step.

    Attributes:
        scalars: what was not finite: `loss`, `grad_norm`, ...
        at_start: rank -> parameters that were not finite at attach.
        before: rank -> parameters that were not finite when the loss was computed.
        sound: ranks whose parameters were finite then.
        batch: rank -> elements of the model's inputs that are not finite (0: not counted).
        rows: rank -> some of the samples that hold them.
        clean: ranks all of whose inputs were finite.
        tensors: gradients that hold such values -> how many elements.
        module, direction, text: where such a value was first made of finite ones.
        teller: rank that reported it, -1 for none.
        function: loss function that gave no finite number, with whether what it was given was
            finite (None: not known).
        output: whether the model's output was finite; None: not known.
    """

    scalars: set[str] = field(default_factory=set)
    at_start: dict[int, tuple[str, ...]] = field(default_factory=dict)
    before: dict[int, tuple[str, ...]] = field(default_factory=dict)
    sound: set[int] = field(default_factory=set)
    batch: dict[int, int] = field(default_factory=dict)
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    clean: set[int] = field(default_factory=set)
    tensors: dict[str, int] = field(default_factory=dict)
    module: str = ""
    direction: str = ""
    text: str = ""
    teller: int = -1
    function: str = ""
    prediction: bool | None = None
    target: bool | None = None
    output: bool | None = None

    def learn(self, events: Sequence[Occurrence], first_step: int) -> None:
        """Takes what was reported of a step, and of the few after it."""
        for event in events:
            data, rank = event.data, event.rank
            names = data.get("at_start")
            if isinstance(names, list | tuple) and event.step <= first_step:
                self.at_start[rank] = tuple(str(n) for n in names)
                continue
            if not first_step <= event.step <= first_step + FOLLOWS:
                continue
            gradients = data.get("gradients")
            # Of parameters that were not finite by then every gradient is such: it has spread.
            spread = event.step > first_step and data.get("model_finite") is False
            if isinstance(gradients, dict) and not spread:
                for name, amount in gradients.items():
                    self.tensors[str(name)] = max(self.tensors.get(str(name), 0), int(amount))
            if event.step == first_step:
                self._of_the_step(event)
            module = str(data.get("module", ""))
            # What is found later with parameters that are not finite is what the update has left.
            made = bool(data.get("input_finite", True)) and bool(
                data.get("parameters_finite", True)
            )
            if module and made and not self.module:
                self.module, self.direction = module, str(data.get("pass", ""))
                self.text, self.teller = str(data.get("origin") or event.text), rank

    def _of_the_step(self, event: Occurrence) -> None:
        data, rank = event.data, event.rank
        scalars = data.get("scalars")
        if isinstance(scalars, list | tuple):
            self.scalars |= {str(name) for name in scalars}
        if data.get("model_finite") is False:
            names = data.get("model_not_finite")
            held = names if isinstance(names, list | tuple) else ()
            self.before[rank] = tuple(str(n) for n in held)
        elif data.get("model_finite") is True:
            self.sound.add(rank)
        if data.get("batch_finite") is False:
            self.batch[rank] = int(data.get("batch_values", 0))
            rows = data.get("batch_rows")
            self.rows[rank] = tuple(int(r) for r in rows) if isinstance(rows, list | tuple) else ()
        elif data.get("batch_finite") is True:
            self.clean.add(rank)
        output = _flag(data.get("output_finite"))
        if output is not None and self.output is not False:
            self.output = output
        if data.get("loss_function") and not self.function:
            self.function = str(data["loss_function"])
            self.prediction = _flag(data.get("prediction_finite"))
            self.target = _flag(data.get("target_finite"))

    def explained(
        self, step: int, *, begins: bool, survived: bool = False
    ) -> tuple[str, str] | None:
        """Cause and remedy, where what was seen settles it; else None.

        Args:
            step: first one at which something was not finite.
            begins: whether it is the first step of its process: nothing has been updated before.
            survived: whether losses were finite again afterwards.
        """
        back = go_back(step, begins=begins, survived=survived)
        # What was not finite at attach and did no harm since may have nothing to do with it.
        at_start = self.at_start if begins or self.before else {}
        reported = at_start or self.before
        if reported:
            names = tuple(dict.fromkeys(n for held in reported.values() for n in held))
            where = f"on {ranks(tuple(reported))}: {listing(names, most=4)}"
            when = (
                "when the monitor was attached, before the first step"
                if at_start
                else f"when the loss of step {step} was computed, before its update"
            )
            source = (
                "So they came from the checkpoint that was loaded, or from the initialisation."
                if at_start or begins
                else f"The loss of step {step - 1} gave no sign of it: possibly its update was too "
                "large, or something else has written to the parameters."
            )
            advice = (
                "Look at the checkpoint that was loaded (`torch.isfinite` of each tensor) and at "
                f"the initialisation of {listing(names, most=3)}."
                if at_start or begins
                else f"Look at what writes to {listing(names, most=3)} between two steps. {back}"
            )
            return f"Parameters were not finite {when}, {where}. {source}", advice
        if self.batch:
            who = tuple(sorted(self.batch))
            amount = sum(self.batch.values())
            rows = self.rows.get(who[0], ())
            cause = sentences(
                f"The inputs of the model held values that are not finite on {ranks(who)} at step "
                f"{step}"
                + (f" ({count(amount, 'element')})" if amount else "")
                + (
                    f", in {'sample' if len(rows) == 1 else 'samples'} "
                    f"{listing([str(r) for r in rows])} of the batch of rank {who[0]}"
                    if rows
                    else ""
                )
                + ": they came with the data.",
                "The parameters were finite until then." if self.sound else "",
            )
            remedy = (
                f"Look at the batch of {ranks(who)} at step {step}, and at what reads, decodes and "
                f"normalises it; drop or repair such samples. {back}"
            )
            return cause, remedy
        if self.function and self.target is False:
            return (
                f"The target that `{self.function}` was given at step {step} is not finite"
                + (", while the prediction is" if self.prediction else "")
                + ": it came with the data.",
                f"Look at the labels of the batch at step {step}, and at what reads and normalises "
                f"them. {back}",
            )
        if self.module:
            cause = f"{self.text[:1].upper()}{self.text[1:]} (as rank {self.teller} reported)."
            return (
                sentences(cause, self._ruled_out()),
                f"Look at {self.module}: possibly a division by zero, a logarithm or root of what "
                f"may be 0 or negative, an overflow in 16 bits. {back}",
            )
        in_loss = bool(self.function and self.prediction and self.target is not False)
        if in_loss or (self.output and "loss" in self.scalars):
            what = (
                f"What `{self.function}` was given at step {step} was finite, and its result is not"
                if in_loss
                else f"The model's output at step {step} was finite, and the loss is not"
            )
            return (
                sentences(f"{what}: it arose in the loss.", self._ruled_out()),
                "Look at the loss: possibly a logarithm of 0, a division by 0 (an average over no "
                f"target at all), an overflow in 16 bits. {back}",
            )
        return None

    def _ruled_out(self) -> str:
        """What was examined and found to be finite."""
        known = []
        if self.clean and not self.batch:
            known.append("the inputs of the model")
        if self.sound and not self.before:
            known.append("its parameters before the update")
        who = tuple(sorted(self.clean | self.sound))
        return f"Of {ranks(who)}, {listing(known)} were finite." if known else ""

    @property
    def ruled_out(self) -> str:
        """One sentence on what was examined and found to be finite; empty for nothing."""
        return self._ruled_out()


def go_back(step: int, *, begins: bool, survived: bool = False) -> str:
    """Where to start again once the cause is mended.

    Args:
        survived: losses were finite again afterwards.
    """
    if survived:
        return (
            "Losses of later steps were finite: the step was skipped, or its gradient replaced, "
            "and no checkpoint has to be restored for it."
        )
    if begins:
        return (
            "Then start again: this was the first step, and there is none before it to go back to."
        )
    return f"Then go on from a checkpoint from before step {step}."


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
