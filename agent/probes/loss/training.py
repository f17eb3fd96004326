"""Loss and accuracy, recorded without being asked."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.model.facts import core, shard
from rankscope.agent.model.tensors import number
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.data.given import sizes_of
from rankscope.agent.probes.loss import sources as loss_sources
from rankscope.agent.probes.loss.classification import Hits, hits_of
from rankscope.agent.probes.loss.deviance import Deviance
from rankscope.agent.probes.loss.evaluation import Evaluation, OutputHook
from rankscope.agent.probes.loss.given_targets import GivenTargets
from rankscope.agent.probes.loss.inputs import LossInputs
from rankscope.agent.probes.loss.labels import Labels
from rankscope.agent.probes.loss.mixtures import (
    Computed,
    made_by,
    mixed,
    shares_in,
    signs_in,
)
from rankscope.agent.probes.loss.next_tokens import NextTokens
from rankscope.agent.probes.loss.passes import Place, place_now, stack_now
from rankscope.agent.probes.loss.sources import Pass
from rankscope.agent.probes.loss.step_loss import common, loss_of, own_passes, sum_of
from rankscope.agent.steps.autograd import graph_task, sequence

# Losses may be computed and never trained on, and `backward` called without a step ever.
_MAX_COMPUTED = 16
_MAX_PASSES = 1024
# Operations between a loss function and what `backward` starts from: casts, factors, means.
_FARTHEST = 8
# Parameters examined to find whose loss a backward pass was.
_SENTINELS = 3


class Loss(Probe):
    """`loss`, `accuracy`, `explained_deviance`, `passes_discarded`, evaluations; digest `labels`.

    Costs 5 microseconds a step; the accuracy (tier `signals`; during evaluation always) a pass over
    the scores, and the digest of the targets (`Labels`) a pass over them, as do the sums behind
    `explained_deviance` (`Deviance`, tier `signals`): the mean over the passes of the step. Of one
    set of scores under several targets (mixup) the accuracy is by the one with the largest share,
    and the deviance by all of them, as they count in the sum that is minimised.

    Where the user logs an `accuracy`, this one is `accuracy_counted`.

    From the targets come `target_deviance`, the loss of the best constant answer to those of this
    step alone, and of classes `target_share`, that over the one by which `explained_deviance` goes:
    1 where batches are drawn at random, less where the targets of a step are alike. From what loss
    functions are given (`LossInputs`): `scores_softmaxed`, 1 where a loss that takes the softmax
    or sigmoid itself is given probabilities; `scores_unnormalised`, 1 where `nll_loss` is given
    something else than their logarithms, and `scores_positive` the same of `kl_div`;
    `labels_outside`, 1 where a binary cross entropy is given labels below 0 or above 1;
    `loss_negated`, 1 where the negative of a squared or absolute error is minimised (0 at other
    passes from then on); `loss_subtracted`, the same of a loss that is one term of a sum;
    `label_smoothing` of a `cross_entropy` that has one;
    `loss_broadcast`, how many times as many differences were taken as there are outputs (1, or N
    where [N, 1] met [N]); and `output_scale`, the root mean square of the outputs over that of the
    targets.

    In training the tensor that `backward` starts from is the loss: it is what is minimised. What
    accumulation divided it by and mixed precision multiplied it with is taken back; a weight that
    the trainer gave it, also beside it (`loss.backward(weight)`), stays.

    Of several backward passes of a step: those that start from losses divided by their number, and
    sums that are divided by the number of elements of all of them together, add up. Otherwise
    passes that are called from one place in the source are micro-batches, of which the mean is
    taken, and those from several places are objectives that are minimised together and add up (a
    discriminator's on what is real and on what is made), as do those after a single forward pass
    of the model; under `no_sync` all are micro-batches. Objectives that one loop goes through with
    a forward pass each cannot be distinguished from micro-batches: log what is meant,
    `monitor.log(loss=...)`, which wins.

    Passes that left this optimizer's gradients alone (another model's) and those whose gradients
    were thrown away again do not count: of these, `passes_discarded` is the number, posted where
    there are any. Where the trainer divides the losses of all passes of a step by one and the same
    number, that is `loss_divisor`, posted from the first such step on; where they are sums over
    elements that it divides, `losses_summed` is 1. Of a closure that is called several times the
    first call counts, as in what `step` returns. Where no `backward` is called it is what
    `torch.autograd.grad` was first asked to differentiate by the parameters, and where the
    optimizer steps in the middle of `backward`, what that started from.

    Leaves `micro_steps`: the number of those backward passes.

    In evaluation mode the losses that no `backward` follows are averaged until training goes on,
    weighted by their batch sizes. Where several are computed, the one that is trained on counts.
    Where what is trained on is a sum of terms, what one function gives is not the loss, and
    nothing shows what the trainer makes of it: it has that function's name,
    `eval/binary_cross_entropy/loss`. But where an evaluation computes one loss only, calls the
    function from another place than training does, and adds nothing to what it returns (which its
    bytecode shows), that loss is what it means.
    Several passes are kept separate: what is computed `with monitor.evaluating("val"):` is
    `eval/val/loss` and `eval/val/accuracy`, in whatever mode. Without a name, passes are
    distinguished by the place in the source that runs them and by the iterations over a DataLoader,
    and are `eval/1/loss`, `eval/2/loss` where there are several. Nothing is recorded of losses
    computed in two loops without a DataLoader: they may be of one data set or of several.

    Attributes:
        phase: the evaluation under way.
        core: the model inside its wrappers; its mode distinguishes training from evaluation.
        divided_by: the number of micro-batches by which the trainer divides losses, as far as it is
            known; 0 for none.
        summed: what backward passes start from adds up to the loss of the step, as the trainer
            divides it itself by whatever it sees fit.
        named: the user is in a pass that has a name.
        in_closures: backward passes were seen in the midst of a step of the optimizer.
        mode, sentinels, shards, reduced, emptied, sampling, passes, taken, owed, busy, forwards,
            wrapper: as a `LossListener` has them.
    """

    name = "loss"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.core = core(context.model)
        self.mode = loss_sources.mode_of(self.core)
        self.sampling = context
        self.sentinels, self.shards = _sentinels(context)
        self.reduced = self.emptied = False
        self._group = context.parameters
        self._computed: deque[Computed] = deque(maxlen=_MAX_COMPUTED)
        self.passes: deque[Pass] = deque(maxlen=_MAX_PASSES)
        self.taken: Pass | None = None
        self.owed = self.trained = -1
        self.busy = False
        self.forwards = 0
        self.wrapper = context.model if isinstance(context.model, DistributedDataParallel) else None
        self.divided_by = 0.0
        self._divides = False
        self.summed = False
        self.in_closures = False
        self._before = -1  # passes there were when the step in progress began, where that is known
        self.phase = Evaluation(context.note)
        self.named = False
        self._trained_at: tuple[Place, ...] = ()
        self._hook: OutputHook | None = None
        self._seconds = 0.0
        self._labels = Labels(context)
        self._deviance = Deviance()
        self._inputs = LossInputs()
        self._next_tokens = NextTokens()
        self._given_targets = GivenTargets()
        self._shares: dict[int, float] = {}
        self._explained: list[float | torch.Tensor] = []
        self.loss_computed = context.guarded("loss", self._loss_computed)
        self.hits_of_pass = context.guarded("loss", self._hits_of_pass)
        self.terms_of_pass = context.guarded("loss", self._terms_of_pass)
        self.root_of_pass = context.guarded("loss", self._inputs.add_root)
        self.pay = context.guarded("loss", self._pay)
        self.model_returned = context.guarded("loss", self._model_returned)

    def start(self, facts: StepFacts) -> None:
        """From now on every loss of the process is seen."""
        loss_sources.listen(self)

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """What was computed before and not trained on is no training loss any more."""
        training = self.core.training and not self.named
        if training:
            self.forwards += torch.is_grad_enabled()
            if self.context.full:
                self._next_tokens.given(args, kwargs)
                self._given_targets.given(args, kwargs)
        if training and not self.busy and self._hook is None:
            return
        self._computed.clear()
        self.busy = False
        if training:
            self._unhook()
            return
        loss_sources.ran_forward(self)
        self.phase.settle()
        if self._hook is None and not self.phase.bare:
            # In time for this very call.
            self._hook = OutputHook(self, self.context.model)

    def _loss_computed(self, name: str, given: dict[str, Any], output: torch.Tensor) -> None:
        if self.core.training:
            began = time.perf_counter()
            self._labels.add(name, given)
            self.context.aside += time.perf_counter() - began
            if not self.sampling.signals:
                return
        began = time.perf_counter()
        judged = hits_of(name, given)
        if output.grad_fn is not None:
            summed = given.get("reduction") == "sum"
            share = None
            if self.core.training and not self.named:
                share = self._deviance.explained(name, given, output)
                self._inputs.add(name, given)
                if self.context.full:
                    self._next_tokens.add(name, given)
                    self._given_targets.add(name, given)
            node, scores = sequence(output.grad_fn), made_by(given.get("input"))
            self._computed.append(Computed(name, node, scores, summed, judged, share, place_now()))
            self.busy = True
        if self.core.training and not self.named:
            known = number(output.detach()) if output.numel() == 1 else None
            if isinstance(known, float) and not math.isfinite(known):
                self.context.loss_function_not_finite(name, given)
            self._seconds += time.perf_counter() - began
        else:
            self.phase.add(name, given, output, judged)

    def _model_returned(self, output: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if self.named or not self.core.training:
            self.phase.add_output(output, args, kwargs)
        if type(output) is torch.Tensor:
            self._unhook()  # a bare tensor says nothing, and the next one will not either

    def _terms_of_pass(self, node: Any) -> None:
        self._shares = shares_in(node, self._computed)
        self._inputs.add_terms(signs_in(node, self._computed))

    def _hits_of_pass(self, node: Any) -> Hits | None:
        # Losses that are trained on are none of an evaluation, whatever the model's mode is.
        self.phase.trained_on()
        computed = tuple(self._computed)
        self._computed.clear()
        self.busy = False
        by_node = {c.node: c for c in computed}
        found = by_node.get(sequence(node))
        if computed:
            terms = found is None and not _comes_from(node, by_node)
            self.phase.learn((found,) if found else computed, terms=terms)
        if found is None and self._shares:
            computed = mixed(computed, self._shares)
        self._shares = {}
        shares = [c.explained for c in (computed if found is None else (found,))]
        self._explained += [s for s in shares if s is not None]
        if found is not None:
            return found.hits
        return next((c.hits for c in computed if c.hits is not None), None)

    def before_step(self, facts: StepFacts) -> None:
        """What comes now until the step has ended comes from a closure."""
        passes = self.passes
        if passes and passes[0][5] != self.context.step:
            self._forget_others()
        self._before = len(passes)

    def passes_so_far(self) -> tuple[int, int]:
        """Backward passes of the step in progress, and those whose gradients were thrown away.

        Those of other models' losses do not count, nor do those of an evaluation.

        Called from another thread than the training's.
        """
        if self.trained != self.context.step:
            return 0, 0
        passes = [one for one in self.passes.copy() if one[3] and one[5] == self.context.step]
        return len(passes), len(passes) - len(own_passes(passes, len(passes), False))

    def _forget_others(self) -> None:
        # Steps that nothing is due at end unnoticed.
        passes, step = self.passes, self.context.step
        while passes and passes[0][5] != step:
            passes.popleft()

    def after_step(self, facts: StepFacts) -> None:
        """Means over the backward passes of the step."""
        passes = self.passes
        if passes and passes[0][5] != self.context.step:
            self._forget_others()
        taken, self.taken = self.taken, None
        if not passes:
            if taken is not None and taken[5] == self.context.step:
                self._post(facts.scalars, taken)
            elif graph_task() != -1:
                self.owed = facts.step
        if passes:
            value, divisor, judged = passes[0][0], passes[0][1], passes[0][4]
            count = 1
            if 0 <= self._before < len(passes):
                self.in_closures = True
            if len(passes) > 1 or divisor != 1.0:
                before = self._before
                single = isinstance(self.context.optimizer, torch.optim.LBFGS)
                if before < 0:
                    before = 0 if single else len(passes)
                own = own_passes(passes, before, single)
                value, judged = self._mean(own)
                count = len(own)
                if before == len(passes) > count:
                    facts.scalars["passes_discarded"] = before - count
                    own = list(passes)
                divisor = common([p[1] for p in own])
                self._divides |= divisor != 1.0
                if self._divides:
                    facts.scalars["loss_divisor"] = divisor
                if any(p[8] is not None for p in own):
                    facts.scalars["losses_summed"] = 1.0
            elif self._divides:
                facts.scalars["loss_divisor"] = 1.0
            facts.shared["micro_steps"] = count
            facts.scalars["loss"] = value
            if judged is not None and (ratio := judged.ratio()) is not None:
                facts.scalars["accuracy"] = ratio
            passes.clear()
        if self._explained:
            facts.scalars["explained_deviance"] = sum(self._explained) / len(self._explained)
            self._explained.clear()
        self._deviance.end(facts)
        self._inputs.end(facts)
        self._next_tokens.end(facts)
        self._given_targets.end(facts)
        self._before = -1
        self.forwards = 0
        self._labels.end(facts)
        if not self._trained_at and self.context.signals:
            self._trained_at = stack_now()
        if self._seconds:
            facts.charge("signals", self._seconds)
            self._seconds = 0.0
            self._computed.clear()
            self.busy = False
        if self.context.parameters is not self._group:
            self._group = self.context.parameters
            self.sentinels, self.shards = _sentinels(self.context)

    def _post(self, scalars: dict[str, float | torch.Tensor], one: Pass) -> None:
        scalars["loss"], judged = one[0], one[4]
        if judged is not None and (ratio := judged.ratio()) is not None:
            scalars["accuracy"] = ratio

    def _pay(self, one: Pass) -> None:
        step, self.owed = self.owed, -1
        scalars: dict[str, float | torch.Tensor] = {}
        self._post(scalars, one)
        self.context.late(step, scalars)

    def _mean(self, passes: list[Pass]) -> tuple[float | torch.Tensor, Hits | None]:
        count = len(passes)
        found = [p[4] for p in passes if p[4] is not None]
        # With a due tier reached in the middle of a step not all passes were judged.
        judged = sum(found[1:], found[0]) if len(found) == count else None
        if self.summed:
            return sum_of(passes), judged
        value, divided_by = loss_of(passes, self.divided_by)
        self.divided_by = divided_by
        return value, judged

    @property
    def evaluated(self) -> bool:
        """Whether `evaluation` has something to report."""
        return self.phase.seen

    def evaluation(self, goes_on: bool = True) -> dict[str, float | torch.Tensor]:
        """Means over the evaluation phase that has just ended; empty where there was none.

        Args:
            goes_on: it is training that has ended it: that is where the call comes from.
        """
        if goes_on:
            self._trained_at = stack_now()
        return self.phase.end(self._trained_at) if self.phase.seen else {}

    def iterated(self, loader: Any) -> None:
        """An iteration over a DataLoader begins."""
        if not self.core.training:
            self.phase.iterated()
        elif torch.is_grad_enabled() and not self.named:
            self.context.loader = sizes_of(loader)

    def enter_pass(self, name: str) -> None:
        """All losses from now on are of an evaluation, of the pass of that name."""
        self.phase.settle()
        self.phase.names.append(name)
        self.named = True
        loss_sources.requests_changed()

    def leave_pass(self) -> dict[str, float | torch.Tensor]:
        """The pass entered last is over: its means."""
        name = self.phase.names.pop()
        means = self.phase.leave(name)
        self.named = bool(self.phase.names)
        loss_sources.requests_changed()
        return means

    def close(self) -> None:
        """Listens no longer."""
        loss_sources.unlisten(self)
        self._unhook()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _comes_from(node: Any, known: Collection[int]) -> bool:
    """Whether a graph's node is what one of these became by operations on it alone.

    A mean, a cast or a factor has one input; what was added to another term has two.
    """
    for _ in range(_FARTHEST):
        before = [function for function, _ in node.next_functions if function is not None]
        if len(before) != 1:
            return False
        node = before[0]
        if sequence(node) in known:
            return True
    return False


def _sentinels(context: Context) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """First, middle and last of the optimizer's parameters; of a sharded model, of its shards."""
    modules = context.model.modules()
    sharded = any(type(m).__module__.startswith("torch.distributed.fsdp") for m in modules)
    found = [
        p
        for group in context.optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and (shard(p) != "" if sharded else type(p) is torch.nn.Parameter)
    ]
    places = sorted({0, len(found) // 2, len(found) - 1}) if found else ()
    chosen = tuple(found[i] for i in places)[:_SENTINELS]
    return ((), chosen) if sharded else (chosen, ())
