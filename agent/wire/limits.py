"""What a batch may ask for at most: declared here once, checked by whoever reads one.

One anonymous batch must not cost the server, and with it every other run, more than an honest one
does. So each field has a limit far beyond what a training needs, that is checked before anything
is built of the field. A refusal names the field; the agent keeps to the limits by itself
(`fitting.py`).

`docs/limits.md` is made of this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a field may be.

    Attributes:
        fields: paths in a batch.
        most: the largest value, length or number that is taken.
        unit: what `most` counts; empty for the value itself.
        because: why it is not more.
    """

    fields: tuple[str, ...]
    most: int
    unit: str
    because: str


BODY = Limit(
    ("body",),
    32 * 2**20,
    "bytes, as sent and unpacked",
    "it is in memory as a whole while it is read; larger batches come in parts",
)
OBJECTS = Limit(
    ("body",),
    1_000_000,
    "values (an array's raw bytes are one)",
    "each takes up to 100 bytes of memory, whatever it took on the wire",
)
DEPTH = Limit(
    ("hello.config", "events[].data"),
    16,
    "levels",
    "nobody reads deeper; the agent writes what is deeper as text",
)
NAME = Limit(
    ("run", "project", "columns", "words", "rows", "word_rows", "layers[].metric"),
    250,
    "characters of a name",
    "names are keys of the database and stand in titles and addresses",
)
LABEL = Limit(
    ("session", "prints[].table", "layers[].table"),
    64,
    "characters",
    "they are keys of the database",
)
TEXT = Limit(
    ("error", "events[].text"),
    65_536,
    "characters",
    "the agent sends 2,000; a person reads less",
)
WORD = Limit(
    (
        *("phase", "events[].kind", "dropped"),
        *("hello.host", "hello.launcher", "hello.wrapper", "hello.tables[].dtypes"),
    ),
    250,
    "characters",
    "they are names of single things",
)
TENSOR_NAME = Limit(
    ("hello.tables", "hello.tables[].names", "hello.tables[].shards"),
    2_000,
    "characters",
    "a path of 100 nested modules has less",
)
SERIES = Limit(
    ("columns", "words", "rows", "word_rows"),
    10_000,
    "series in a batch",
    "each costs a lookup in the run's dictionary",
)
SERIES_OF_RUN = Limit(
    ("columns", "words", "rows", "word_rows", "layers"),
    50_000,
    "series of a run",
    "a run's dictionary is in memory; numbers of single tensors (`layers`) are one series a metric",
)
ROWS = Limit(
    ("rows", "word_rows"), 10_000, "rows in a batch", "what is more comes as columns, or in parts"
)
ITEMS = Limit(
    ("prints", "layers", "events"), 10_000, "items in a batch", "each is a row of the database"
)
REASONS = Limit(("dropped",), 100, "reasons", "the agent knows a dozen")
RANKS = Limit(
    ("world_size",),
    2**20,
    "",
    "ten times the ranks of the largest jobs; a rank costs nothing until it is heard of",
)
RANK = Limit(("rank", "hello.local_rank"), 2**20 - 1, "", "below the largest world size")
ATTEMPT = Limit(
    ("attempt",), 1_000_000, "", "restarts are counted on from it, in 31 bits of the database"
)
SEQ = Limit(
    ("seq",),
    2**62,
    "",
    "what follows has to fit into 63 bits; a part of a batch has its number in the upper 30",
)
STEP = Limit(
    (
        *("through_step", "columns[].steps", "words[].steps", "rows[]", "word_rows[]"),
        *("prints[].step", "layers[].step", "events[].step"),
    ),
    2**53 - 1,
    "",
    "JSON and JavaScript count no further; it is more than any counter of tokens reaches",
)
COUNT = Limit(("dropped[]",), 2**53 - 1, "", "JSON and JavaScript count no further")
PID = Limit(("hello.pid",), 2**31 - 1, "", "no system gives larger ones")
HEARTBEAT = Limit(
    ("hello.heartbeat_seconds",),
    86_400,
    "seconds",
    "a rank is missed after a few of them; one that promises less is not watched",
)
TABLES = Limit(("hello.tables",), 1_000, "tables", "the agent has a handful a process")
DIMENSIONS = Limit(("hello.tables[].shapes",), 64, "dimensions", "torch has no more")
ELEMENTS = Limit(
    ("hello.tables[].shapes",), 2**53 - 1, "elements of a tensor", "more than any memory holds"
)
CONFIG = Limit(
    ("hello.config", "events[].data"),
    262_144,
    "characters as JSON, about",
    "it stands beside the run in every list of runs",
)
SHARDED_OVER = Limit(
    tuple(f"hello.config.sharded_over.{key}" for key in ("first", "step", "count")),
    2**20,
    "",
    "they are ranks, and numbers of ranks",
)

# Of a process whose step does not end: threads, frames of each, characters of one. The agent sends
# no more and the server keeps no more: 16,000 characters in all, far below the 262,144 of `CONFIG`,
# which an event's data may have.
STACK_THREADS, STACK_FRAMES, STACK_CHARACTERS = 8, 25, 80
# Of its last collectives: how many, and of each so many shapes with so many dimensions.
COLLECTIVES, COLLECTIVE_SHAPES = 8, 4

LIMITS = (
    *(BODY, OBJECTS, DEPTH, NAME, LABEL, WORD, TEXT, TENSOR_NAME, SERIES, SERIES_OF_RUN, ROWS),
    *(ITEMS, REASONS, RANKS, RANK, ATTEMPT, SEQ, STEP, COUNT, PID, HEARTBEAT, TABLES, DIMENSIONS),
    *(ELEMENTS, CONFIG, SHARDED_OVER),
)
