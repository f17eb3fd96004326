"""Makes a batch fit into the limits: what a user's program says may be of any length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from rankscope.agent.wire import limits
from rankscope.agent.wire.batch import Batch, Event, Hello, TensorTable
from rankscope.agent.wire.limits import Limit
from rankscope.agent.wire.plain import to_plain

# Of the values of a batch this part may be in tables; the rest is for what else it says.
_TABLE_SHARE = 0.8
# What was left out is named, of many things the first few.
_MAX_NAMED = 50


def fitted(batch: Batch) -> Batch:
    """The batch with its texts, configuration and tables cut to what is taken.

    What is left out of a hello is named in its configuration, as `left_out`. Numbers are left as
    they are.
    """
    changed: dict[str, Any] = {}
    for name, limit in (("error", limits.TEXT), ("phase", limits.WORD)):
        text = getattr(batch, name)
        if len(text) > limit.most:
            changed[name] = text[: limit.most]
    if batch.events:
        changed["events"] = tuple(_event(event) for event in batch.events)
    if batch.hello is not None:
        changed["hello"] = _hello(batch.hello)
    return replace(batch, **changed) if changed else batch


def _event(event: Event) -> Event:
    data, _ = _plain(event.data)
    return replace(
        event,
        kind=event.kind[: limits.WORD.most],
        text=event.text[: limits.TEXT.most],
        data=data,
    )


def _hello(hello: Hello) -> Hello:
    tables, left_out = _tables(hello.tables)
    config, keys = _plain(hello.config)
    left_out = [*keys, *left_out]
    if left_out:
        config = {**config, "left_out": left_out[:_MAX_NAMED]}
    return replace(
        hello,
        host=hello.host[: limits.WORD.most],
        launcher=hello.launcher[: limits.WORD.most],
        wrapper=hello.wrapper[: limits.WORD.most],
        config=config,
        tables=tables,
    )


def _plain(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Plain values, not too deep; without the longest ones where they are too long together."""
    made: dict[str, Any] = to_plain(given, limits.DEPTH.most)
    sizes = {key: _size(key) + _size(value) for key, value in made.items()}
    left_out: list[str] = []
    total = sum(sizes.values())
    if total <= limits.CONFIG.most:
        return made, left_out
    # Room for the names of what is left out, here and of the tables.
    room = limits.CONFIG.most - (_MAX_NAMED + 1) * (limits.WORD.most + 4)
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if total <= room:
            break
        total -= sizes[key]
        del made[key]
        left_out.append(key[: limits.WORD.most])
    return made, left_out


def _size(value: Any) -> int:
    """As `counting.length_of`, with what is in it."""
    if isinstance(value, str):
        return len(value) + 4
    if isinstance(value, dict):
        return 4 + sum(_size(key) + _size(part) for key, part in value.items())
    if isinstance(value, list):
        return 4 + sum(map(_size, value))
    return 10


def _tables(given: Mapping[str, TensorTable]) -> tuple[dict[str, TensorTable], list[str]]:
    """The tables that there is room for, small ones first; names of the others."""
    left = int(_TABLE_SHARE * limits.OBJECTS.most)
    made: dict[str, TensorTable] = {}
    left_out = []
    for name in sorted(given, key=lambda name: len(given[name].names)):
        table = given[name]
        left -= sum(4 + len(shape) for shape in table.shapes)
        if left < 0 or len(made) == limits.TABLES.most or len(name) > limits.TENSOR_NAME.most:
            left_out.append(f"tables.{name}"[: limits.WORD.most])
            continue
        made[name] = replace(
            table,
            names=_shortened(table.names, limits.TENSOR_NAME),
            dtypes=_shortened(table.dtypes, limits.WORD),
            shards=_shortened(table.shards, limits.TENSOR_NAME),
        )
    # In the order in which they were given: of two versions the later one holds.
    return {name: made[name] for name in given if name in made}, left_out


def _shortened(texts: tuple[str, ...], limit: Limit) -> tuple[str, ...]:
    """Texts none of which is too long; different ones stay different."""
    if all(len(text) <= limit.most for text in texts):
        return texts
    return tuple(text if len(text) <= limit.most else _short(text, limit.most) for text in texts)


def _short(text: str, most: int) -> str:
    sum_of_all = blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
    return f"{text[: most - len(sum_of_all) - 1]}~{sum_of_all}"
