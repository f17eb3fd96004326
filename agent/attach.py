"""`attach(model, optimizer)`: the only line that a trainer needs."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import weakref
from dataclasses import replace
from typing import Any

import torch

from rankscope.agent import model_facts
from rankscope.agent.launcher import Identity, identify
from rankscope.agent.monitor import Monitor, NullMonitor
from rankscope.agent.options import Options, resolve
from rankscope.agent.records import Records
from rankscope.agent.sender import Sender
from rankscope.agent.tensors import TensorGroup
from rankscope.agent.wire import Hello, TensorTable

_logger = logging.getLogger("rankscope")
_monitors: weakref.WeakKeyDictionary[Any, Monitor | NullMonitor] = weakref.WeakKeyDictionary()


def attach(
    model: torch.nn.Module, optimizer: Any, *, step: int | None = None, **options: Any
) -> Monitor | NullMonitor:
    """Watches the training of `model` by `optimizer` on this rank.

    Call it on every rank, after the model is wrapped (DDP and the like) and the optimizer built.
    Called again for the same optimizer it returns the same monitor. Loss, accuracy, gradient norms,
    learning rate, timing and fingerprints of the parameters are recorded from then on and posted by
    a thread; after `attach` has returned, nothing of it raises into the training, takes part in a
    collective, or waits for the network or the device.

    Args:
        model: the module that is called in training, wrapped or not.
        optimizer: a `torch.optim.Optimizer`, or a wrapper around one with `param_groups`.
        step: number of optimizer steps taken before; read off the optimizer's state if not given.
        **options: `server`, `token`, `project`, `run`, `mode`, `spool`, `overhead`, `tensorboard`;
            each has an environment variable `RANKSCOPE_...` as well. Argument before environment
            before default.

    Returns:
        The monitor; one that does nothing with `mode="disabled"`.

    Raises:
        TypeError: `model` is no module, `optimizer` has no parameter groups, or an option is not
            known.
        ValueError: an option has an impossible value.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"attach(model, optimizer): model is a {type(model).__name__}, not a torch.nn.Module"
        )
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise TypeError(
            f"attach(model, optimizer): optimizer is a {type(optimizer).__name__} without "
            "param_groups; pass the torch optimizer, or a wrapper around it"
        )
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"attach(..., step={step!r}): must be a number of steps from 0")
    resolved = resolve(options, os.environ)
    known = _monitors.get(optimizer)
    if known is not None and not known.closed:
        return known
    identity = identify(os.environ, run=resolved.run, torch_distributed=_torch_distributed)
    monitor: Monitor | NullMonitor
    if resolved.mode == "disabled":
        monitor = NullMonitor(identity.run, identity.rank)
    else:
        first = model_facts.first_step(optimizer) if step is None else step
        monitor = _monitor(model, optimizer, resolved, identity, first)
    _monitors[optimizer] = monitor
    return monitor


def _torch_distributed() -> tuple[int, int] | None:
    """Rank and world size of the default process group, where there is one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None


def _monitor(
    model: torch.nn.Module, optimizer: Any, options: Options, identity: Identity, step: int
) -> Monitor:
    if not model_facts.trainable_parameters(model, optimizer)[1]:
        raise ValueError(
            "attach(model, optimizer): neither has a parameter that requires a gradient; attach "
            "after the model is built and its parameters are unfrozen"
        )
    hello = Hello(
        started_at=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        local_rank=identity.local_rank,
        launcher=identity.launcher,
        wrapper=model_facts.wrapper_of(model),
        heartbeat_seconds=Sender.HEARTBEAT_SECONDS,
        config=model_facts.configuration(model, optimizer),
    )
    tables: dict[str, TensorTable] = {}
    records = Records()
    owner: list[weakref.ref[Monitor]] = []
    address = f"rankscope: run {identity.run} at {options.server}/runs/{identity.run}\n"

    def phase() -> str:
        monitor = owner[0]() if owner else None
        return "start" if monitor is None else monitor.phase

    def announce(group: TensorGroup) -> None:
        # The server keeps what it was told before; of a table with versions the last is enough.
        base = group.table.partition("@")[0]
        for known in [name for name in tables if name.partition("@")[0] == base]:
            del tables[known]
        tables[group.table] = group.described()
        sender.say_hello_again()

    def connected() -> None:
        if identity.rank == 0 and not identity.fresh:
            sys.stderr.write(address)

    # Every rank meets the same absent server: one of them says so. A rank that alone cannot reach
    # it is missed by the server instead.
    level = logging.WARNING if identity.rank == 0 else logging.INFO
    if identity.warning:
        _logger.log(level, "%s", identity.warning)
    if identity.fresh:
        # Nobody knows an id that was made up here: it is told whether or not a server answers.
        sys.stderr.write(address)
    sender = Sender(
        records,
        options=options,
        identity=identity,
        hello=lambda: replace(hello, tables=dict(tables)),
        phase=phase,
        on_problem=lambda text: _logger.log(level, "%s", text),
        on_connected=connected,
    )
    monitor = Monitor(
        model,
        optimizer,
        options=options,
        identity=identity,
        records=records,
        sender=sender,
        announce=announce,
        step=step,
    )
    owner.append(weakref.ref(monitor))
    # A closed monitor must not keep the model and the optimizer alive.
    monitor.on_close = lambda: _forget(monitor)
    return monitor


def _forget(monitor: Monitor) -> None:
    for optimizer, known in list(_monitors.items()):
        if known is monitor:
            del _monitors[optimizer]
