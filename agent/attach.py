"""`attach(model, optimizer)`: the only line that a trainer needs."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rankscope.agent.delivery.session import Session
from rankscope.agent.guard import attempt
from rankscope.agent.launcher import Identity, identify
from rankscope.agent.model import facts
from rankscope.agent.model.configuration import configuration
from rankscope.agent.monitor import Monitor
from rankscope.agent.null_monitor import NullMonitor
from rankscope.agent.options import Options, facts_of, resolve
from rankscope.agent.process.spawned import in_helper
from rankscope.agent.steps.torch_monitor import TorchMonitor
from rankscope.agent.wire import Event

_UNCOUNTED = (
    "the optimizer has taken steps before and does not keep how many: here they count from 0. "
    "A run that goes on gets its step by attach(model, optimizer, step=...)"
)

_monitors: weakref.WeakKeyDictionary[Any, TorchMonitor | NullMonitor] = weakref.WeakKeyDictionary()


def attach(
    model: torch.nn.Module,
    optimizer: Any,
    *,
    step: int | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> TorchMonitor | NullMonitor:
    """Watches the training of `model` by `optimizer` on this rank.

    Call it on every rank, after the model is wrapped (DDP and the like) and the optimizer built.
    Called again for the same optimizer it returns the same monitor; at an interactive prompt and in
    notebooks it ends the monitor of an earlier model of the same class. Loss, accuracy, gradient
    norms, learning rate, timing and fingerprints of the parameters are recorded from then on and
    posted by a thread; after `attach` has returned, nothing of it raises into the training, takes
    part in a collective, or waits for the network or the device.

    Args:
        model: the module that is called in training, wrapped or not.
        optimizer: a `torch.optim.Optimizer`, or a wrapper around one with `param_groups`. Of a list
            of them the one that holds most of the model, the first of equals: its steps are the
            steps of the run, and those of the others are seen, as they are without.
        step: number of optimizer steps taken before; read off the optimizer's state if not given.
        config: facts that a person wants to see beside the run; JSON-able. `profile` says what the
            loss is, where it is none that has to fall: `adversarial`, `reinforcement`, `surrogate`
            or `contrastive`. Where a name is one of the agent's own facts, the agent's holds.
        **options: `server`, `token`, `project`, `run`, `mode`, `spool`, `overhead`, `allowance`,
            `tensorboard`, `console`, `git_diff`, `tags`; each has an environment variable
            `RANKSCOPE_...` as well. Argument before environment before default.

    Returns:
        The monitor; one that does nothing with `mode="disabled"`, and in a process that helps the
        trainer's own (a worker that loads data) and imports its script for that.

    Raises:
        TypeError: `model` is no module, `optimizer` has no parameter groups, `config` is not
            JSON-able, or an option is not known.
        ValueError: an option has an impossible value.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"attach(model, optimizer): model is a {type(model).__name__}, not a torch.nn.Module"
        )
    if isinstance(optimizer, list | tuple):
        optimizer = _main_of(model, optimizer)
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise TypeError(
            f"attach(model, optimizer): optimizer is a {type(optimizer).__name__} without "
            "param_groups; pass the torch optimizer, or a wrapper around it"
        )
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"attach(..., step={step!r}): must be a number of steps from 0")
    resolved = resolve(options, os.environ)
    config_facts = facts_of(config, resolved.tags)
    _leave_to_parent()
    known = _monitors.get(optimizer)
    if known is not None and not known.closed:
        return known
    identity = identify(os.environ, run=resolved.run, torch_distributed=_torch_distributed)
    monitor: TorchMonitor | NullMonitor
    if resolved.mode == "disabled" or in_helper():
        monitor = NullMonitor(identity.run, identity.rank)
    else:
        if not facts.is_trained(model, optimizer):
            raise ValueError(
                "attach(model, optimizer): neither has a parameter that requires a gradient; "
                "attach after the model is built and its parameters are unfrozen"
            )
        if _interactive():
            _end_predecessors(model)
        first = facts.first_step(optimizer) if step is None else step
        uncounted = step is None and facts.has_uncounted_steps(optimizer)
        # Nobody's training ends because something is wrong with the agent.
        monitor = attempt(
            lambda: _monitor(
                model, optimizer, resolved, identity, first, config_facts, uncounted=uncounted
            ),
            name="attach",
        ) or NullMonitor(identity.run, identity.rank)
    _monitors[optimizer] = monitor
    return monitor


def _main_of(model: torch.nn.Module, optimizers: Sequence[Any]) -> Any:
    """The optimizer that holds most elements of a model; nothing is chosen among others."""
    # Of what has no shape yet the size is not known.
    own = {id(p): 0 if facts.is_unsized(p) else p.numel() for p in model.parameters()}

    def held(optimizer: Any) -> int:
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list):
            return -1
        return sum(own.get(id(p), 0) for group in groups for p in group["params"])

    return max(optimizers, key=held, default=None)


def _leave_to_parent() -> None:
    """In a forked child: ends the monitors of its parent here, where they report nothing."""
    for known in list(_monitors.values()):
        if isinstance(known, TorchMonitor) and known.inherited:
            known.close()


def _interactive() -> bool:
    """Whether a person types: in a notebook, or at the interpreter's prompt."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _end_predecessors(model: torch.nn.Module) -> None:
    """Ends the monitors of models of the same class.

    A cell that is run again makes its model and optimizer anew, and nobody closes what watched the
    ones before: it would keep them in memory for ever.
    """
    for known in list(_monitors.values()):
        if isinstance(known, TorchMonitor) and known.watches_class_of(model):
            known.close()


def _torch_distributed() -> tuple[int, int] | None:
    """Rank and world size of the default process group, where there is one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None


def _monitor(
    model: torch.nn.Module,
    optimizer: Any,
    options: Options,
    identity: Identity,
    step: int,
    config_facts: Mapping[str, Any],
    *,
    uncounted: bool,
) -> TorchMonitor:
    faults: list[str] = []
    # Models are of all kinds; what can be said of one is not worth the whole agent.
    config = attempt(
        lambda: configuration(model, optimizer), name="configuration", report=faults.append
    )
    if identity.restarts_left is not None:
        config = {**(config or {}), "restarts_left": identity.restarts_left}
    connection = Session(
        options,
        identity,
        config={**config_facts, **(config or {})},
        wrapper=facts.wrapper_of(model),
    )
    for text in faults:
        connection.records.event(Event(step=step, kind="agent.fault", text=text))
    if uncounted:
        connection.records.event(Event(step=step, kind="agent.note", text=_UNCOUNTED))
    monitor = TorchMonitor(model, optimizer, connection=connection, step=step)
    # A closed monitor must not keep the model and the optimizer alive.
    monitor.on_close = lambda: _forget(monitor)
    return monitor


def _forget(monitor: Monitor) -> None:
    for optimizer, known in list(_monitors.items()):
        if known is monitor:
            del _monitors[optimizer]
