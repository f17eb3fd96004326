"""Ranks that were started with different code, models, optimizers or libraries."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.desync.precision import SERIES, Precisions
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, ranks, sentences
from rankscope.server.window import Check, Window

# What ranks say of themselves: how much it matters that it is the same, and how a person calls it.
# What belongs to a model must agree among those that hold the same tensors only. Settings of the
# optimizer are compared step by step (`desync.hyperparameters`).
_OF_THE_MODEL = {
    "model": ("critical", "class of the model"),
    "modules": ("warning", "kinds of modules in the model"),
    "trainable_digest": ("critical", "which parameters are trained"),
    "buffers_digest": ("warning", "names or shapes of the buffers"),
    "optimizer": ("critical", "class of the optimizer"),
    "optimizer_tensors/order_digest": ("critical", "what the optimizer holds, or in which order"),
    "training_mode": ("warning", "training or evaluation mode"),
    "tied": ("warning", "which parameters are tied"),
    "data_parallel/broadcast_buffers": ("warning", "broadcast_buffers"),
    "data_parallel/find_unused_parameters": ("warning", "find_unused_parameters"),
    "data_parallel/static_graph": ("warning", "static_graph"),
    "data_parallel/require_backward_grad_sync": ("warning", "require_backward_grad_sync"),
    "data_parallel/communication_hooks": ("critical", "communication hooks"),
    "data_parallel/ignored": ("critical", "parameters that DDP ignores"),
    "data_parallel/group_size": ("critical", "size of the process group"),
    "data_parallel/backend": ("warning", "backend"),
}
_OF_THE_JOB = {
    "git_commit": ("warning", "commit of the code"),
    "script": ("warning", "script"),
    "precision/default_dtype": ("warning", "default dtype"),
    "precision/autocast": ("warning", "autocast"),
    "precision/float32_matmul": ("info", "precision of float32 products"),
    "precision/cudnn_tf32": ("info", "TF32 in cuDNN"),
    "determinism/deterministic_algorithms": ("info", "deterministic algorithms"),
    "torch": ("info", "version of torch"),
    "python": ("info", "version of Python"),
    "numpy": ("info", "version of numpy"),
    "cuda": ("info", "version of CUDA"),
    "device": ("info", "kind of device"),
    "device_name": ("info", "device"),
}
# Settings of modules, `Dropout.p`: those of torch's own do what they say; those of the user's
# classes (`Net().verbose`) may be meant to differ.
_MODULES = "module_settings"
_OWN = "()."
_LAYOUT = "names, shapes or order of the parameters"
_DETAILS = 12


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that is not the same everywhere.

    Attributes:
        values: value, as JSON -> ranks that have it; the most frequent first.
        decided: whether most ranks have the first.
        tensors: names of the parameters that it is about, where they are known.
        frozen: ranks on which those are not trained -> their names.
    """

    key: str
    severity: str
    called: str
    values: tuple[tuple[str, tuple[int, ...]], ...]
    decided: bool
    tensors: tuple[str, ...] = ()
    frozen: Mapping[tuple[int, ...], tuple[str, ...]] = field(default_factory=dict)

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks whose value differs from that of most; all of them where there is no majority."""
        others = self.values[1:] if self.decided else self.values
        return tuple(sorted(rank for _, held in others for rank in held))


@dataclass(slots=True)
class ConfigState:
    """What is remembered: the configurations last compared, and what came of that."""

    compared: int = 0
    known: Mapping[int, Mapping[str, Any]] | None = None
    settings: tuple[Setting, ...] = ()
    first_step: int = 0
    precisions: Precisions = field(default_factory=Precisions)


class Config(Detector[ConfigState]):
    """Ranks that were not started alike: other code, another model, other libraries.

    Statistic:
        What each process says of itself at attach, compared as text: what belongs to the model
        among ranks with one layout of parameters (class, trained tensors, kinds and settings of its
        modules, as rates of dropout), code and libraries among all. It stands until the ranks are
        started again. Settings of modules that are another on every rank of three or more are meant
        to be: they are a rank's own number, say. Settings of the optimizer are
        `desync.hyperparameters`. And the precision of autocast (`autocast`), where it is not the
        same on all ranks at four samples (key `precision`).

    Severity:
        That of the worst difference: critical for model, optimizer, trained parameters and what is
        reduced; warning for code, precision, modes and settings of torch's modules; info for
        settings of the user's own classes, versions and devices.

    Evidence:
        `settings`: for each, its values and the ranks that have them.

    Source:
        pytorch/pytorch#32426 and others: a node with another checkout or another file.
    """

    kinds = ("desync.config",)
    wants = (SERIES,)
    lasting = "what ranks were started with is reported once, at attach"
    min_ranks = 2

    def advance(self, window: Window, state: ConfigState) -> Outcome:
        """Compares, once all ranks have said what they are, and after a restart."""
        precisions = state.precisions.take(window)
        configs = window.complete_configs
        if configs and len(window.steps) and configs != state.known:
            # Who was like the others, and attached anew (a resume), differs since then.
            since = max if state.known is not None and not state.settings else min
            state.known = configs
            state.compared = len(configs)
            state.settings = _differences(window, configs)
            newest = [begins[-1] for begins in window.begins.values() if begins]
            state.first_step = since(newest, default=int(window.steps[0]))
        findings: tuple[Finding, ...] = ()
        if state.settings:
            findings = (_finding(state.settings, state.first_step, window.last_step),)
        return Outcome({"desync.config": _check(window, state)}, (*findings, *precisions))


def _differences(window: Window, configs: Mapping[int, Mapping[str, Any]]) -> tuple[Setting, ...]:
    found: list[Setting | None] = []
    everyone = tuple(sorted(configs))
    layout = _difference("parameters_digest", "critical", _LAYOUT, configs, everyone)
    # Stages of a pipeline hold different models, each stage on as many ranks.
    if layout is not None and (layout.decided or _in_one_group(configs)):
        severity, called = _OF_THE_MODEL["modules"]
        found += [layout, _difference("modules", severity, called, configs, everyone)]
    models: dict[str | None, list[int]] = defaultdict(list)
    for rank in everyone:
        models[_value(configs[rank], "parameters_digest")].append(rank)
    for key, (severity, called) in _OF_THE_MODEL.items():
        for members in models.values():
            if len(members) > 1:
                setting = _difference(key, severity, called, configs, tuple(members))
                # Of a sharded optimizer each rank holds a part of its own.
                own = key == "optimizer_tensors/order_digest" and setting is not None
                if not (own and setting is not None and not setting.decided):
                    found.append(_with_tensors(setting, configs))
    for members in models.values():
        if len(members) > 1:
            found += _of_modules(configs, tuple(members))
    if not any(setting is not None and setting.key == "tied" for setting in found):
        found += _tied_on_some(configs, everyone, len(models))
    for key, (severity, called) in _OF_THE_JOB.items():
        found.append(_difference(key, severity, called, configs, everyone))
    return tuple(setting for setting in found if setting is not None)


def _in_one_group(configs: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether DDP has wrapped one model over all ranks: none of them is a part of another."""
    sizes = {_value(config, "data_parallel/group_size") for config in configs.values()}
    # What it is told to ignore (tables, experts) may be other on each rank by design.
    ignored = {_value(config, "data_parallel/ignored") for config in configs.values()}
    return sizes == {str(len(configs))} and ignored <= {None, "[]"}


def _tied_on_some(
    configs: Mapping[int, Mapping[str, Any]], everyone: tuple[int, ...], layouts: int
) -> list[Setting | None]:
    """Parameters tied on some ranks only, which have fewer of them and so another layout.

    Stages of a pipeline have other layouts, too; but with all modules and settings alike it is one
    model that was built, and an untied tensor is no part of it.
    """
    if layouts < 2:
        return []
    alike: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
    for rank in everyone:
        built = tuple(_value(configs[rank], key) for key in ("model", "modules", _MODULES))
        if None not in built:
            alike[built].append(rank)
    severity, called = _OF_THE_MODEL["tied"]
    return [
        _difference("tied", severity, called, configs, tuple(members))
        for members in alike.values()
        if len(members) > 1
    ]


def _of_modules(
    configs: Mapping[int, Mapping[str, Any]], members: tuple[int, ...]
) -> list[Setting | None]:
    """Settings of modules that differ among ranks with one layout of parameters."""
    reported = {r: s for r in members if isinstance(s := configs[r].get(_MODULES), Mapping)}
    if len(reported) < 2:
        return []
    found: list[Setting | None] = []
    for name in sorted({name for settings in reported.values() for name in settings}):
        values = {r: _counted(settings.get(name)) for r, settings in reported.items()}
        if len(set(values.values())) == len(values) > 2:
            continue  # another on every rank: its own number
        severity = "info" if _OWN in name else "warning"
        by_rank = {r: {name: value} for r, value in values.items()}
        found.append(_difference(name, severity, name, by_rank, tuple(reported)))
    return found


def _counted(values: object) -> str:
    """How often a setting has which value, as text; the value alone where it has but one."""
    if not isinstance(values, Mapping) or not values:
        return "absent"
    if len(values) == 1:
        return str(next(iter(values)))
    return ", ".join(f"{value} ({times} times)" for value, times in values.items())


def _with_tensors(
    setting: Setting | None, configs: Mapping[int, Mapping[str, Any]]
) -> Setting | None:
    """With the parameters that are trained on some ranks only, where ranks report them."""
    if setting is None or setting.key != "trainable_digest":
        return setting
    first = setting.values[0][1][0]
    names: dict[str, None] = {}
    for _, (rank, *_rest) in setting.values[1:]:
        for key in ("frozen", "trained"):
            one, other = configs[first].get(key), configs[rank].get(key)
            if isinstance(one, list) and isinstance(other, list):
                common = {*one} & {*other}
                names |= dict.fromkeys(str(n) for n in (*one, *other) if n not in common)
                break
    everyone = sorted(rank for _, held in setting.values for rank in held)
    frozen: dict[tuple[int, ...], tuple[str, ...]] = {}
    for name in names:
        where = tuple(rank for rank in everyone if _freezes(configs[rank], name))
        frozen[where] = (*frozen.get(where, ()), name)
    return replace(setting, tensors=tuple(names), frozen=frozen)


def _freezes(config: Mapping[str, Any], name: str) -> bool:
    frozen, trained = config.get("frozen"), config.get("trained")
    if isinstance(frozen, list):
        return name in frozen
    return isinstance(trained, list) and name not in trained


def _difference(
    key: str,
    severity: str,
    called: str,
    configs: Mapping[int, Mapping[str, Any]],
    members: tuple[int, ...],
) -> Setting | None:
    values: dict[str, list[int]] = defaultdict(list)
    for rank in members:
        value = _value(configs[rank], key)
        if value is not None:
            values[value].append(rank)
    if len(values) < 2:
        return None
    ordered = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
    decided = len(ordered[0][1]) > len(ordered[1][1]) and len(members) > 2
    return Setting(key, severity, called, tuple((v, tuple(r)) for v, r in ordered), decided)


def _value(config: Mapping[str, Any], key: str) -> str | None:
    """A setting as text; None where the rank did not say it."""
    part: Any = config
    for name in key.split("/"):
        if not isinstance(part, Mapping) or name not in part:
            return None
        part = part[name]
    if key == "device":
        part = str(part).split(":")[0]  # each rank has its own
    return part if isinstance(part, str) else json.dumps(part, sort_keys=True, default=str)


def _finding(settings: tuple[Setting, ...], step: int, last_step: int) -> Finding:
    order = ("critical", "warning", "info")
    ranked = sorted(settings, key=lambda s: order.index(s.severity))
    worst = ranked[0]
    decided = all(s.decided for s in ranked)
    suspects = tuple(
        sorted({r for s in ranked if s.severity == worst.severity for r in s.suspects})
    )
    names = listing(list(dict.fromkeys(s.called for s in ranked)), most=4)
    more = f" and {len(ranked) - 1} more" if len(ranked) > 1 else ""
    nobody = ""
    if not decided:
        nobody = "No value is that of most ranks, so nothing shows which ones are wrong."
    return Incident.since(step, last_step).finding(
        kind="desync.config",
        severity=worst.severity,
        title=f"{ranks(suspects).capitalize()} "
        + agree(len(suspects), "was")
        + f" started differently ({worst.called}{more})",
        ranks=suspects,
        tensors=worst.tensors,
        stage="start",
        cause=sentences(
            f"When the monitor was attached, the ranks differed in {names}.",
            *(_described(setting) for setting in ranked[:3]),
            nobody,
        ),
        remedy=_remedy(worst),
        # It stands until they are started again, and then it is said anew.
        evidence={
            "settings": {
                s.key: {value[:200]: list(held) for value, held in s.values}
                for s in ranked[:_DETAILS]
            }
        },
    )


def _described(setting: Setting) -> str:
    said = []
    for value, held in setting.values[:3]:
        readable = "other" if setting.key.endswith("digest") else value[:60]
        said.append(f"{readable} on {ranks(held)}")
    called = setting.called[:1].upper() + setting.called[1:]
    if setting.tensors:
        shown = [
            f"{listing([f'`{name}`' for name in names], most=4)} "
            f"{agree(len(names), 'is')} frozen on {ranks(held)} only"
            for held, names in setting.frozen.items()
        ]
        return f"{called}: differs on {ranks(setting.suspects)}; {listing(shown, most=4)}."
    if setting.key.endswith("digest"):
        return f"{called}: differs on {ranks(setting.suspects)}."
    return f"{called}: {listing(said)}."


def _remedy(worst: Setting) -> str:
    if worst.severity == "info":
        return (
            "Use the same libraries and devices on all nodes, or accept that results differ in "
            "their last digits."
        )
    if worst.key in ("git_commit", "script"):
        return "Start all ranks from one checkout: update the node that is behind, and restart."
    return (
        "Build model and optimizer from one configuration on all ranks, without conditions on the "
        "rank, and start them again."
    )


def _check(window: Window, state: ConfigState) -> Check:
    if state.compared:
        return Check.ok(
            f"{count(state.compared, 'rank')} were started with the same code and model."
        )
    said = sum(bool(c) for c in window.configs.values())
    return Check.missing(
        f"Only {said} of {window.world_size} ranks have said how they were started.",
        early=f"{said} of {window.world_size} ranks have said how they were started.",
    )
