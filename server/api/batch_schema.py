"""The JSON of a batch as JSON Schema: what a trainer in any language may post to `/ingest`.

What the schema takes, the server takes, but for what JSON Schema cannot say: that steps and values
are as many, that a series stands once, and that all of it together fits into the limits. Fields
that are not named here are ignored, so that a newer trainer can post to an older server.
"""

from __future__ import annotations

from typing import Any

from rankscope.agent import wire
from rankscope.agent.wire import Limit

Schema = dict[str, Any]

limits = wire.limits

NAME = "Batch"


def _text(limit: Limit, said: str, **more: Any) -> Schema:
    return {"type": "string", "maxLength": limit.most, "description": said, **more}


def _integer(limit: Limit, said: str, *, least: int = 0, **more: Any) -> Schema:
    bounds = {"minimum": least, "maximum": limit.most}
    return {"type": "integer", **bounds, "description": said, **more}


def _list(items: Schema, said: str, limit: Limit | None = None) -> Schema:
    most = {} if limit is None else {"maxItems": limit.most}
    return {"type": ["array", "null"], "items": items, **most, "description": said}


def _object(said: str, properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "description": said, "properties": properties, **needed}


def _named(values: Schema, said: str, limit: Limit) -> Schema:
    """An object whose keys are names of the user's."""
    return {
        "type": ["object", "null"],
        "propertyNames": _NAME,
        "maxProperties": limit.most,
        "additionalProperties": values,
        "description": said,
    }


# Printable characters alone. JSON Schema's patterns know no classes of Unicode: here are those
# that come into texts by accident.
_CONTROL = r"\u0000-\u001f\u007f-\u00a0\u00ad\u2028\u2029"
_NAME: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": limits.NAME.most,
    "pattern": f"^[^{_CONTROL}]+$",
}
_NUMBER: Schema = {
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
}
_DIGEST: Schema = {
    "anyOf": [
        {"type": "string", "pattern": "^[0-9a-fA-F]{1,16}$"},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    ],
}
_STEP: Schema = {"type": "integer", "minimum": 0, "maximum": limits.STEP.most}
_STEPS: Schema = {
    "description": "as many as values, in any order; or `range`: first, end (behind the last) and "
    "stride",
    "anyOf": [
        {"type": "array", "items": _STEP},
        {
            "type": "object",
            "required": ["range"],
            "properties": {
                "range": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0},
                    "minItems": 3,
                    "maxItems": 3,
                }
            },
        },
    ],
}


def _columns(value: Schema, said: str) -> Schema:
    one = _object(
        "points of one series",
        {"steps": _STEPS, "values": {"type": "array", "items": value}},
        ("steps", "values"),
    )
    return _named(one, said, limits.SERIES)


def _rows(value: Schema, said: str) -> Schema:
    row = {
        "type": "array",
        "prefixItems": [
            _STEP,
            {**_named(value, "name and value", limits.SERIES), "type": "object"},
        ],
        "minItems": 2,
        "maxItems": 2,
    }
    return _list(row, said, limits.ROWS)


_TABLE = _object(
    "tensors, in the order in which fingerprints and layers have their numbers; all four lists are "
    "of one length",
    {
        "names": _list({"type": "string", "maxLength": limits.TENSOR_NAME.most}, "their names"),
        "shapes": _list(
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "maxItems": limits.DIMENSIONS.most,
            },
            "as this rank holds them",
        ),
        "dtypes": _list({"type": "string", "maxLength": limits.WORD.most}, "for example `float32`"),
        "shards": _list(
            {"type": "string", "maxLength": limits.TENSOR_NAME.most},
            "which part of a tensor this rank holds: ranks with the same name and shard are "
            "replicas; left out, or empty text: all of it",
        ),
    },
)
_HELLO = {
    **_object(
        "what holds for the whole life of the process: with its first batch",
        {
            "started_at": {"type": "number", "description": "seconds since 1970"},
            "host": _text(limits.WORD, "name of the machine", default=""),
            "pid": _integer(limits.PID, "number of the process", default=0),
            "local_rank": _integer(limits.RANK, "on its host", default=0),
            "launcher": _text(limits.WORD, "what started the process", default=""),
            "wrapper": _text(limits.WORD, "how gradients are averaged, as `ddp`", default=""),
            "heartbeat_seconds": {
                "type": "number",
                "minimum": 0,
                "maximum": limits.HEARTBEAT.most,
                "default": 5,
                "description": "how often a batch comes at least, empty ones included: a rank that "
                "is quiet for several times as long is missed; 0: it is not watched",
            },
            "boot": _text(limits.LABEL, "which boot of the machine `steady` counts from"),
            "steady": {"type": "number", "description": "seconds since that boot at the start"},
            "config": {
                "type": ["object", "null"],
                "description": "whatever a person wants to see beside the run: learning rate, "
                "optimizer, seed",
            },
            "tables": {
                "type": ["object", "null"],
                "additionalProperties": _TABLE,
                "maxProperties": limits.TABLES.most,
                "description": "tensors by name of the table, mostly `parameters` alone",
            },
        },
    ),
    "type": ["object", "null"],
}
_STAGE = {"enum": list(wire.STAGES)}
_TABLE_NAME = _text(limits.LABEL, "of `hello.tables`", default="parameters")

SCHEMA: Schema = _object(
    "A batch: what one rank reports at one time.\n\nThe server stores a batch of one `run`, "
    "`rank`, `session` and `seq` once, however often it comes. Integers have no fraction, not even "
    "`.0`.",
    {
        "v": {
            "type": "integer",
            "minimum": 1,
            "maximum": wire.VERSION,
            "default": wire.VERSION,
            "description": "version of this form",
        },
        "run": {
            **_NAME,
            # It stands in addresses, and spaces at its ends are seen by nobody.
            "pattern": f"^(?! )(?!\\.{{1,2}}$)[^/\\\\{_CONTROL}]*[^ /\\\\{_CONTROL}]$",
            "description": "id of the run, the same on all ranks; it stands in addresses",
        },
        "project": {
            **_NAME,
            "pattern": f"^(?! )[^{_CONTROL}]*[^ {_CONTROL}]$",
            "default": "default",
            "description": "groups runs",
        },
        "rank": _integer(limits.RANK, "which process of the job, from 0"),
        "world_size": _integer(limits.RANKS, "how many there are", least=1, default=1),
        "session": _text(
            limits.LABEL,
            "random text of this process, so that one that is started again does not repeat the "
            "numbers of the one before",
            default="",
        ),
        "seq": _integer(limits.SEQ, "number of the batch in its session: 0, 1, 2, ..."),
        "attempt": {
            **_integer(limits.ATTEMPT, "how often the launcher has restarted the job"),
            "type": ["integer", "null"],
        },
        "sent_at": {"type": "number", "description": "seconds since 1970", "default": 0},
        "through_step": _integer(
            limits.STEP,
            "last step of which this rank has now said everything: it is judged up to there; -1 "
            "before the first",
            least=-1,
            default=-1,
        ),
        "state": {
            "enum": list(wire.RANK_STATES),
            "default": "running",
            "description": "`finished` or `failed` with the last batch",
        },
        "phase": _text(limits.WORD, "what the process is doing, as `forward`", default=""),
        "error": _text(limits.TEXT, "why it failed", default=""),
        "hello": _HELLO,
        "columns": _columns(
            _NUMBER,
            "series of numbers by name: `loss`, `accuracy`, `lr`, `grad_norm`, `step_seconds`, "
            "`eval/loss`, or one of your own",
        ),
        "words": _columns(
            _DIGEST,
            "64-bit digests by what was digested: `parameters`, `batch`, or another stage; equal "
            "digests mean equal bits",
        ),
        "rows": _rows(_NUMBER, "the same as `columns`, step by step"),
        "word_rows": _rows(_DIGEST, "the same as `words`, step by step"),
        "prints": _list(
            _object(
                "fingerprint of every tensor of a table at one step",
                {
                    "step": _integer(limits.STEP, "step", least=-1),
                    "stage": {**_STAGE, "description": "link of the chain"},
                    "table": _TABLE_NAME,
                    "digests": {"type": "array", "items": _DIGEST},
                    "sketches": {
                        "type": ["array", "null"],
                        "items": {"type": "array", "items": _NUMBER},
                        "description": "one row of buckets a tensor, linear in the tensor, the "
                        "same function on all ranks",
                    },
                },
                ("step", "stage", "digests"),
            ),
            "fingerprints, tensor by tensor",
            limits.ITEMS,
        ),
        "layers": _list(
            _object(
                "one number for every tensor of a table at one step",
                {
                    "step": _integer(limits.STEP, "step"),
                    "table": _TABLE_NAME,
                    "metric": {**_NAME, "description": "for example `grad_norm`"},
                    "values": {"type": "array", "items": _NUMBER},
                },
                ("step", "metric", "values"),
            ),
            "numbers of single tensors",
            limits.ITEMS,
        ),
        "events": _list(
            _object(
                "something that happened once",
                {
                    "step": _integer(limits.STEP, "step", least=-1, default=-1),
                    "kind": _text(limits.WORD, "`mark` for a remark of yours"),
                    "text": _text(limits.TEXT, "what a person reads", default=""),
                    "data": {"type": ["object", "null"]},
                },
                ("kind",),
            ),
            "what happened",
            limits.ITEMS,
        ),
        "dropped": {
            "type": ["object", "null"],
            "propertyNames": {"maxLength": limits.WORD.most},
            "additionalProperties": {
                "type": "integer",
                "minimum": 0,
                "maximum": limits.COUNT.most,
            },
            "maxProperties": limits.REASONS.most,
            "description": "points given up since the start, by reason",
        },
    },
    ("run", "rank", "seq"),
)


def document() -> Schema:
    """The schema as a file of its own."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A batch of Rankscope",
        **SCHEMA,
    }
