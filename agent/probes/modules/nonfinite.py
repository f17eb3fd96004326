"""Where infinities and NaN come from: the batch, the parameters, a module, the backward pass."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from rankscope.agent.model.facts import plain_name
from rankscope.agent.probes.base import LONGEST_PIECE, Context, Probe, StepFacts, processor_time
from rankscope.agent.probes.data.given import tensors_in
from rankscope.agent.probes.modules.finite_checks import (
    MOST_CHECKS,
    BackwardCheck,
    Call,
    Check,
    all_finite,
    finiteness,
    numbers_in,
)
from rankscope.agent.probes.modules.module_hook import ModuleHooks
from rankscope.agent.probes.norms import gathered, stored
from rankscope.agent.probes.numbers_in_transit import Arrival
from rankscope.agent.probes.tables import readable
from rankscope.agent.steps.autograd import graph_task
from rankscope.agent.wire import Layers

# What makes a search for the origin worth its cost.
_ALARMING = frozenset(("loss", "grad_norm", "grad_norm_local", "grad_norm_canary"))
# Steps that are watched after one that was not finite.
_WATCHED = 3
# After `_QUIET` finite steps the next one that is not is examined again; at most `_MOST_INCIDENTS`
# times in a run.
_QUIET = 64
_MOST_INCIDENTS = 16
# Micro-batches of a step whose inputs are kept until it ends.
_MOST_INPUTS = 64
# On a device: checks of a batch whose answers are under way.
_MOST_ANSWERS = 16
# Rows of a batch that are reported.
_MOST_ROWS = 5
_MOST_NAMES = 20


class NonFinite(Probe):
    """`grad_nonfinite` of each tensor, and events `nonfinite` that say where it began.

    Costs nothing as long as loss and gradient norm are finite but a question or two a step. At a
    step where one was not, the gradients' elements that are not finite are counted (on a device,
    where that is known a step or two late: at the next steps).

    An update by such a gradient makes everything else not finite, too: where it came from is seen
    before that or never. On a CPU the loss is known when its backward pass begins; what the model
    was given is held until the step ends, and checked then, as are the parameters. At sampled
    steps (tier `full`) hooks on all modules hold what they gave, until the model has returned:
    where that is not finite the first module that gave such values is found. On a device, where
    nothing may wait, batches are checked where tier `word` is due. What is not finite at attach
    is reported at once, read off the sketches of the parameters.

    The three steps after such a step are sampled
    whatever they cost, and hooks on all modules of a model that is not compiled check inputs,
    outputs, parameters and the gradients that come back, two operations each: the first that was
    not finite is reported. The hooks come off with the step. At most 16 times in a run, and not
    again before 64 finite steps.
    """

    name = "nonfinite"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._hooks = ModuleHooks()
        self._named: list[tuple[str, torch.nn.Module]] = []
        self._names: list[str] = []
        self._modules: list[torch.nn.Module] = []
        self._parameter_hooks: list[Any] = []
        self._checks: list[Check] = []
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], BackwardCheck]] = {}
        self._bad_step = -_QUIET - 1
        self._watch_until = -1
        self._incidents = 0
        self._inputs: list[tuple[Any, Any]] = []
        self._answers: deque[tuple[int, Arrival]] = deque(maxlen=_MOST_ANSWERS)
        # What stands for the root module (itself, if it is called), and whether it has returned.
        self._entered: torch.nn.Module | None = None
        self._returned = False
        self._held: list[Call] | None = None  # where outputs are held and not checked at once
        self._origin: dict[str, Any] = {}
        self._origin_step = -1
        self._seconds = 0.0
        self._on_host: tuple[Any, bool] = (None, False)
        self.module_called = context.guarded(self.name, self._module_called)
        context.loss_not_finite = context.guarded(self.name, self._loss_not_finite)
        context.loss_function_not_finite = context.guarded(self.name, self._loss_function)

    def start(self, facts: StepFacts) -> None:
        """Reports what is not finite before the first step."""
        pending = facts.shared.get("start")
        if pending is None:
            return
        names, step = self.context.parameters.names, self.context.step

        def deliver() -> None:
            sketches = pending.result().sketches
            if sketches is None:
                return
            bad = [names[row] for row in np.flatnonzero(~np.isfinite(sketches).all(axis=1))]
            if bad:
                text = f"{len(bad)} parameters are not finite before the first step: "
                text += ", ".join(bad[:5]) + (", ..." if len(bad) > 5 else "")
                data = {"at_start": bad[:_MOST_NAMES], "count": len(bad)}
                self.context.event(step, "nonfinite", text, data)

        facts.when_ready(pending, deliver)

    def not_finite(self, step: int, names: list[str]) -> None:
        """Has the next steps watched, and counts what is still there."""
        alarming = sorted(_ALARMING.intersection(names))
        if not alarming:
            return
        before, self._bad_step = self._bad_step, max(step, self._bad_step)
        if step <= before + _QUIET or self._incidents >= _MOST_INCIDENTS:
            return
        self._incidents += 1
        now = self.context.step
        self._watch_until = now + _WATCHED
        self.context.schedule.ask_dense(self._watch_until)
        data: dict[str, Any] = {"scalars": alarming}
        text = f"{' and '.join(alarming)} not finite"
        # On a CPU it is known before the gradients are gone.
        counts = self._counts_on_host() if step == now else {}
        if counts:
            data["gradients"] = dict(list(counts.items())[:_MOST_NAMES])
            data["tensors"] = len(counts)
            text += f"; {len(counts)} gradients hold such values: {', '.join(list(counts)[:5])}"
            text += ", ..." if len(counts) > 5 else ""
        text = self._with_origin(step, data, text)
        self.context.event(step, "nonfinite", text, data)

    def _with_origin(self, step: int, data: dict[str, Any], text: str) -> str:
        """Adds what was seen of the batch, the parameters and the modules at that step."""
        if step == self._origin_step:
            data |= self._origin
        for then, answer in self._answers:
            if then == step and answer.ready():
                data["batch_finite"] = bool(answer.result().all())
        if data.get("batch_finite") is False:
            text += "; the inputs of the model are not finite"
        elif data.get("model_finite") is False:
            text += "; the parameters were not finite before the step"
        elif "module" in data:
            text += f"; {data['origin']}"
        return text

    def _host(self) -> bool:
        """Whether all parameters are on the host, where nothing waits for a device."""
        group = self.context.parameters
        if self._on_host[0] is not group:
            self._on_host = group, all(p.device.type == "cpu" for p in group.tensors)
        return self._on_host[1]

    def _now(self) -> dict[str, Any]:
        """What is known of the step in progress."""
        if self._origin_step != self.context.step:
            self._origin_step, self._origin = self.context.step, {}
        return self._origin

    @torch.no_grad()
    def _loss_not_finite(self) -> None:
        """A backward pass begins from such a loss, on a host: nothing has been updated by it."""
        found = self._now()
        if self._is_quiet() or "model_finite" in found or not self._host():
            return
        bad: list[int] = []
        seen = False
        for args, kwargs in self._inputs:
            for tensor in tensors_in(args, kwargs):
                if not (tensor.is_cpu and tensor.is_floating_point()):
                    continue
                values = stored(tensor)
                if values is None or not values.numel():
                    continue
                seen = True
                wrong = ~torch.isfinite(values)
                if wrong.any():
                    rows = wrong.reshape(len(wrong), -1).any(dim=1) if wrong.dim() else wrong
                    bad += torch.nonzero(rows).flatten().tolist()[:_MOST_ROWS]
                    found["batch_values"] = found.get("batch_values", 0) + int(wrong.sum())
        if seen:
            found["batch_finite"] = "batch_values" not in found
            if bad:
                found["batch_rows"] = sorted(set(bad))[:_MOST_ROWS]
        group = self.context.parameters
        names = [
            name
            for name, tensor in zip(group.names, group.held(), strict=True)
            if tensor.numel() and not bool(torch.isfinite(tensor).all())
        ]
        found["model_finite"] = not names
        if names:
            found["model_not_finite"] = names[:_MOST_NAMES]
        self._check_held()

    def _is_quiet(self) -> bool:
        """Whether what is not finite now is nothing new, or was examined often enough."""
        too_soon = self.context.step <= self._bad_step + _QUIET
        return too_soon or self._incidents >= _MOST_INCIDENTS

    @torch.no_grad()
    def _loss_function(self, name: str, given: dict[str, Any]) -> None:
        """A loss function has given no finite number: was it given any other?"""
        found = self._now()
        if self._is_quiet() or "loss_function" in found:
            return
        found["loss_function"] = name
        for key, names in (
            ("prediction_finite", ("input", "input1", "anchor", "log_probs")),
            ("target_finite", ("target", "targets")),
        ):
            there = [given[n] for n in names if isinstance(given.get(n), torch.Tensor)]
            numbers = [t for t in there if t.is_cpu and t.is_floating_point()]
            if numbers:
                found[key] = all_finite(numbers)

    @torch.no_grad()
    def _check_held(self) -> None:
        """Of what modules have given at this step, finds the first that was not finite."""
        calls, self._held = self._held, None if self._held is None else []
        if not calls:
            return
        bad = [call for call in calls if not all_finite(call.outputs)]
        # Masks are infinite on purpose: NaN says more.
        first = next((c for c in bad if any(t.isnan().any() for t in c.outputs)), None)
        first = first or next(iter(bad), None)
        found = self._now()
        if first is None or "module" in found:
            return
        own = [p for p in first.module._parameters.values() if p is not None]
        check = Check(self._names[first.place], "forward", None)
        text, data = check.report(
            inputs_finite=all_finite(list(numbers_in(first.given))),
            parameters_finite=all_finite(own),
        )
        found |= data
        found["origin"] = text

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Puts the hooks in place where the step is watched.

        Not before: of a compiled model no forward pass is seen, and to find hooks on its modules
        would have it compiled anew.
        """
        context = self.context
        if not torch.is_grad_enabled() or not context.trains(module):
            return
        self._keep_inputs(args, kwargs)
        self._returned = False
        self._entered = module
        watched = context.step <= self._watch_until
        if self._hooks or not (watched or (context.full and self._host())):
            return
        began = processor_time()
        if context.modules.is_compiled():
            return
        self._know(context.modules.named())
        if not watched:
            self._held = []
            self._hooks.put_on(self, self._modules)
            self._seconds += processor_time() - began
            return
        self._held = None
        self._hooks.put_on(self, self._modules)
        self._parameter_hooks = [
            p.register_hook(self._guarded(BackwardCheck(self._checks, name, parameter=key)))
            for name, m in zip(self._names, self._modules, strict=True)
            for key, p in m._parameters.items()
            if p is not None and p.requires_grad and p.is_leaf
        ]

    def _know(self, named: list[tuple[str, torch.nn.Module]]) -> None:
        if named is not self._named:
            self._named = named
            self._names = [plain_name(n) or type(m).__name__ for n, m in named]
            self._modules = [m for _, m in named]

    def _keep_inputs(self, args: Any, kwargs: Any) -> None:
        if self._host():
            if len(self._inputs) < _MOST_INPUTS:
                self._inputs.append((args, kwargs))
        elif self.context.word:
            began = processor_time()
            with torch.no_grad():
                given = [
                    t for t in tensors_in(args, kwargs) if t.is_floating_point() and readable(t)
                ]
                flag = finiteness(given)
            if flag is not None:
                self._answers.append((self.context.step, Arrival(flag)))
            self._seconds += processor_time() - began

    def _hold(self, held: list[Call], place: int, module: torch.nn.Module, call: Any) -> None:
        """Holds what a module took and gave until the root module has returned."""
        # What runs again inside a backward pass (checkpointing) or after the model is not held: it
        # would live longer for it.
        if self._returned or graph_task() != -1:
            return
        clock = time.perf_counter if place else processor_time
        began = clock()
        args, output = call
        if type(output) is torch.Tensor:  # as most modules give: no walk, and no calls
            numbers = output.is_floating_point() or output.is_complex()
            outputs = [output.detach()] if numbers and output.is_cpu else []
        else:
            outputs = [t.detach() for t in numbers_in(output) if t.is_cpu]
        if place == 0 or module is self._entered:
            with torch.no_grad():
                self._root_gave(held, place, module, args, outputs)
        elif outputs and len(held) < MOST_CHECKS:
            plain = len(args) == 1 and type(args[0]) is torch.Tensor
            held.append(Call(place, module, args if plain else list(numbers_in(args)), outputs))
        spent = clock() - began
        self._seconds += min(spent, LONGEST_PIECE) if place else spent

    def _root_gave(
        self,
        held: list[Call],
        place: int,
        module: torch.nn.Module,
        args: Any,
        outputs: list[torch.Tensor],
    ) -> None:
        """The root module comes last. Where it gave finite numbers nothing is checked."""
        finite = all_finite(outputs)
        # What comes after one that stands for it is not held.
        if place == 0 and outputs and self._now().get("output_finite") is not False:
            self._now()["output_finite"] = finite
        if not finite:
            held.append(Call(place, module, list(numbers_in(args)), outputs))
            self._check_held()
        self._held, self._returned = [], True

    def _module_called(self, place: int, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self.context.trains(module) or len(self._checks) >= MOST_CHECKS:
            return
        if self._held is not None:
            self._hold(self._held, place, module, (args, output))
        else:
            self._check(place, module, args, output)

    @torch.no_grad()
    def _check(self, place: int, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Checks at once what a module took and gave."""
        name = self._names[place]
        inputs, outputs = list(numbers_in(args)), list(numbers_in(output))
        own = [p for p in module._parameters.values() if p is not None]
        if outputs:
            self._checks.append(
                Check(name, "forward", finiteness(outputs), finiteness(inputs), finiteness(own))
            )
        for tensor in inputs:
            known, seen = self._outputs.get(id(tensor), (None, None))
            if known is not None and seen is not None and known() is tensor:
                seen.consumers.append(name)
            elif tensor.requires_grad and not tensor.is_leaf:
                self._watch_gradient(tensor, BackwardCheck(self._checks, "", consumers=[name]))
        for tensor in outputs:
            known, _ = self._outputs.get(id(tensor), (None, None))
            # A container passes on what a module inside it has made.
            if tensor.requires_grad and (known is None or known() is not tensor):
                self._watch_gradient(tensor, BackwardCheck(self._checks, name))

    def _watch_gradient(self, tensor: torch.Tensor, seen: BackwardCheck) -> None:
        tensor.register_hook(self._guarded(seen))
        self._outputs[id(tensor)] = (weakref.ref(tensor), seen)

    def _guarded(self, call: BackwardCheck) -> Any:
        return self.context.guarded(self.name, call)

    def after_step(self, facts: StepFacts) -> None:
        """Counts at sampled steps; says what the hooks have seen, and takes them off."""
        self._inputs = []
        if self._seconds:
            facts.charge("full" if self._hooks else "word", self._seconds)
            self._seconds = 0.0
        if self._hooks:
            with facts.charged("full"):
                checks = self._checks
                self._let_go()
                self._report(facts, checks)
        if self.context.full:
            with facts.charged("full"):
                self._count(facts)

    def close(self) -> None:
        """Takes the hooks off."""
        self._let_go()
        self._hooks.remove()
        self._inputs = []

    def _let_go(self) -> None:
        self._hooks.take_off()
        for handle in self._parameter_hooks:
            handle.remove()
        # A new list: hooks in graphs that live on write into the old one.
        self._parameter_hooks, self._checks, self._outputs = [], [], {}
        self._held = None

    def _report(self, facts: StepFacts, checks: list[Check]) -> None:
        there = [
            (row, column, flag)
            for row, check in enumerate(checks)
            for column, flag in enumerate((check.made, check.given, check.own))
            if flag is not None
        ]
        if not there:
            return
        arrival = Arrival(gathered([flag for _, _, flag in there]))
        step = facts.step

        def deliver() -> None:
            flags = np.ones((len(checks), 3), dtype=np.bool_)
            flags[[r for r, _, _ in there], [c for _, c, _ in there]] = arrival.result() > 0
            bad = np.flatnonzero(~flags[:, 0])
            if len(bad) and self._watch_until >= 0:
                check = checks[bad[0]]
                _, inputs, own = (bool(flag) for flag in flags[bad[0]])
                text, data = check.report(inputs_finite=inputs, parameters_finite=own)
                self.context.event(step, "nonfinite", text, data)
                self._watch_until = -1

        facts.when_ready(arrival, deliver)

    @torch.no_grad()
    def _count(self, facts: StepFacts) -> None:
        group, norms = self.context.parameters, facts.shared.get("gradient_norms")
        if norms is None:
            return
        total = facts.scalars["grad_norm"]
        if not isinstance(total, torch.Tensor) or total.is_cpu:
            if math.isfinite(float(total)):
                return
        elif facts.step > self._watch_until:
            return
        counts = [(~torch.isfinite(t)).sum() for t in norms.tensors]
        arrival = Arrival(gathered(counts))

        def deliver() -> None:
            values = np.full(len(group.names), np.nan)
            values[norms.rows] = arrival.result()
            if np.nansum(values) > 0:
                facts.layers.append(
                    Layers(
                        step=facts.step, table=group.table, metric="grad_nonfinite", values=values
                    )
                )

        facts.when_ready(arrival, deliver)

    @torch.no_grad()
    def _counts_on_host(self) -> dict[str, int]:
        counts = {}
        group = self.context.parameters
        for name, parameter in zip(group.names, group.tensors, strict=True):
            gradient = None if parameter.grad is None else stored(parameter.grad)
            if gradient is not None and gradient.device.type == "cpu":
                count = int((~torch.isfinite(gradient)).sum())
                if count:
                    counts[name] = count
        return counts
