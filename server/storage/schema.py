"""The tables, as SQLAlchemy Core. The same on SQLite and PostgreSQL.

Every table that grows with the data has a primary key that starts with the run, and nothing on the
way of a batch joins across runs: so the tables can be distributed by run (`distribution.py`), or
cut into ranges of runs (`partitions.py`), as they are.

Points are stored as packed chunks, little-endian float64 or uint64 in a binary column: NaN and
infinities come back as they were (SQLite turns a NaN in a REAL column into NULL), and a point costs
8 bytes and its share of a row. docs/storage.md has the figures. Times are seconds since 1970, UTC.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite gives row numbers to INTEGER keys only.
_Key = BigInteger().with_variant(Integer, "sqlite")

# The key of each run's name. Apart from `run`: a table that is distributed by key cannot make sure
# that a name is given once. Keys ascend with time and are never given again.
run_name = Table(
    "run_name",
    metadata,
    Column("key", _Key, primary_key=True, autoincrement=True),
    Column("id", String(250), nullable=False, unique=True),
    sqlite_autoincrement=True,
)

run = Table(
    "run",
    metadata,
    Column("key", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String(250), nullable=False),
    Column("project", String(250), nullable=False),
    Column("state", String(16), nullable=False),
    Column("world_size", Integer, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("last_seen_at", Float, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("config", JSON, nullable=False),
    # Raised by each batch in its transaction. The row lock that this takes makes the order of the
    # numbers the order of the commits, so that a reader who has seen n has seen all before n.
    Column("arrivals", BigInteger, nullable=False, server_default="0"),
    Column("evaluated", BigInteger, nullable=False, server_default="0"),
    Column("evaluated_step", BigInteger, nullable=False, server_default="-1"),
    # Number of the last start of the whole job, that of the first one of the same launch, and the
    # step at which the last went on from a checkpoint after all of its processes had ended; see
    # `starts.py`.
    Column("start", Integer, nullable=False, server_default="0"),
    Column("first_start", Integer, nullable=False, server_default="0"),
    Column("resumed_step", BigInteger, nullable=True),
    Column("dense_until", BigInteger, nullable=True),
    # What was not evaluated: it came after its step had been evaluated, or there was
    # no room for it.
    Column("late", BigInteger, nullable=False, server_default="0"),
    Column("given_up", BigInteger, nullable=False, server_default="0"),
    # Newest runs first, of all projects and of one.
    Index(None, "started_at", "key"),
    Index(None, "project", "started_at", "key"),
)
# The evaluator asks every second which runs have something new, and which may have fallen silent:
# few of many.
Index(
    "ix_run_unevaluated",
    run.c.key,
    sqlite_where=run.c.arrivals > run.c.evaluated,
    postgresql_where=run.c.arrivals > run.c.evaluated,
)
Index(
    "ix_run_running",
    run.c.last_seen_at,
    sqlite_where=run.c.state == text("'running'"),
    postgresql_where=run.c.state == text("'running'"),
)

# One process of one rank. A rank that restarts gets another attempt.
attempt = Table(
    "attempt",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("session", String(64), primary_key=True),
    # In the order in which they began.
    Column("attempt", Integer, nullable=False),
    # The highest number of a batch that has come, and the process's own time when it was made.
    Column("last_seq", BigInteger, nullable=False),
    # All batches from `first_seq` to before `end_seq` are stored, and so are the ranges in `taken`,
    # all of which end at or before `taken_end`. A batch and these are stored in one transaction,
    # so that a batch that comes again is known and stores nothing.
    Column("first_seq", BigInteger, nullable=False),
    Column("end_seq", BigInteger, nullable=False),
    Column("taken_end", BigInteger, nullable=False, server_default="0"),
    Column("sent_at", Float, nullable=False),
    Column("world_size", Integer, nullable=False),
    Column("host", Text, nullable=False, server_default=""),
    Column("pid", Integer, nullable=False, server_default="0"),
    Column("local_rank", Integer, nullable=False, server_default="0"),
    Column("launcher", Text, nullable=False, server_default=""),
    Column("wrapper", Text, nullable=False, server_default=""),
    Column("heartbeat_seconds", Float, nullable=False, server_default="5"),
    Column("started_at", Float, nullable=False),
    Column("first_seen", Float, nullable=False),
    Column("last_seen", Float, nullable=False),
    # Times between posts: the longest, and the typical one as a running estimate of the median.
    Column("longest_gap", Float, nullable=False, server_default="0"),
    Column("typical_gap", Float, nullable=False, server_default="0"),
    # First step that it has said anything about; NULL where it has not, or nobody noted it.
    Column("first_step", BigInteger, nullable=True),
    Column("last_step", BigInteger, nullable=False),
    Column("through_step", BigInteger, nullable=False),
    # Number of the arrival that it was first heard with, and of the start of the job it belongs to.
    Column("first_arrival", BigInteger, nullable=False, server_default="0"),
    Column("start", Integer, nullable=False, server_default="0"),
    Column("state", String(16), nullable=False),
    Column("phase", String(32), nullable=False, server_default=""),
    Column("error", Text, nullable=False, server_default=""),
    Column("dropped", JSON, nullable=False),
    # What it said of itself, and the number of the arrival that did last, so that a reader sees
    # whether it is new.
    Column("config", JSON, nullable=True),
    Column("hello_arrival", BigInteger, nullable=True),
    # Name of each tensor table -> the version of it that holds now.
    Column("tables", JSON, nullable=False),
)

# What tensors a rank holds; the same for most ranks.
tensor_table = Table(
    "tensor_table",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("version", String(32), primary_key=True),
    Column("tensors", JSON, nullable=False),
)

# Numbers of batches that were stored apart from the newest unbroken range: where a batch has been
# given up, came late or was cut to pieces.
taken = Table(
    "taken",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("session", String(64), primary_key=True),
    Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("end_seq", BigInteger, nullable=False),
)

metric = Table(
    "metric",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Integer, primary_key=True, autoincrement=False),
    # `scalar`, `word` for the digests of a stage, `layers` for one number a tensor of a table.
    Column("kind", String(8), nullable=False),
    Column("name", String(250), nullable=False),
    # Of layers: name of the table and its version; empty where the rank had not reported that yet.
    Column("table", String(64), nullable=False, server_default=""),
    Column("version", String(32), nullable=False, server_default=""),
    UniqueConstraint("run", "kind", "name", "table", "version"),
)

# Series that came together in one batch, with values at the same steps.
layout = Table(
    "layout",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Integer, primary_key=True, autoincrement=False),
    # Their numbers in the run's dictionary, ascending: int32.
    Column("metrics", LargeBinary, nullable=False),
)

# All of them in one row: with a row for each series, keys and indexes would cost more than the
# values do where batches are short, and a page of each series' index would change with each batch.
chunk = Table(
    "chunk",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("layout", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, primary_key=True, autoincrement=False),
    Column("arrival", BigInteger, primary_key=True, autoincrement=False),
    Column("last_step", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    # Number of steps, S.
    Column("points", Integer, nullable=False),
    # See `packing.pack_steps`; NULL where the steps are first_step, first_step + 1, ...
    Column("steps", LargeBinary, nullable=True),
    # float64, or uint64 for digests, [M, S]: each series of the layout in its order.
    Column("values", LargeBinary, nullable=False),
    # The evaluator reads what has come since it last read.
    Index(None, "run", "arrival"),
)

# Rows of `chunk` that were several, and which of their steps came when; see `merging.py`.
merged_chunk = Table(
    "merged_chunk",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("layout", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, primary_key=True, autoincrement=False),
    # That of the first part, as it stands in `chunk`.
    Column("arrival", BigInteger, primary_key=True, autoincrement=False),
    Column("last_arrival", BigInteger, nullable=False),
    # See `packing.pack_parts`.
    Column("parts", LargeBinary, nullable=False),
    # The evaluator asks which of them reach beyond what it has seen: mostly none.
    Index(None, "run", "last_arrival"),
)

# Count, mean, smallest and largest value of stretches of steps; see `rollups.py`.
rollup = Table(
    "rollup",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("metric", Integer, primary_key=True, autoincrement=False),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("block", BigInteger, primary_key=True, autoincrement=False),
    # Place of its first bucket, and how many there are.
    Column("first", Integer, nullable=False),
    Column("buckets", Integer, nullable=False),
    # uint8, places of the buckets; NULL where none is left out.
    Column("offsets", LargeBinary, nullable=True),
    # int32; NULL where each step has a point.
    Column("counts", LargeBinary, nullable=True),
    # float32 or float64 [3, buckets]: means, smallest, largest.
    Column("values", LargeBinary, nullable=False),
)

# How far a run's roll-ups go; see `watermarks.py`.
rollup_mark = Table(
    "rollup_mark",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    # Rises with every change: who writes by an older one has been overtaken.
    Column("number", BigInteger, nullable=False),
    Column("arrival", BigInteger, nullable=False),
    # Something that came up to `arrival` still has to be rolled up.
    Column("pending", Boolean, nullable=False),
    # int64 [R, 5] and [256].
    Column("ranks", LargeBinary, nullable=False),
    Column("touched", LargeBinary, nullable=False),
    Column("touched_width", BigInteger, nullable=False),
    # int64 [R, 2 + tiers]: rank, its last short row of `chunk`, up to where they are merged.
    Column("merges", LargeBinary, nullable=True),
)

# One number for each tensor of a table at some steps.
layers = Table(
    "layers",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("metric", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, primary_key=True, autoincrement=False),
    Column("arrival", BigInteger, primary_key=True, autoincrement=False),
    Column("last_step", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    # Number of steps, S, and of tensors, T.
    Column("points", Integer, nullable=False),
    Column("tensors", Integer, nullable=False),
    # As for chunks.
    Column("steps", LargeBinary, nullable=True),
    # float64 [T, S]: the steps of one tensor stand together, so that a series of it reads these
    # alone.
    Column("values", LargeBinary, nullable=False),
)

# Whose fingerprint came when, of what. What it says is in `print_content`.
fingerprint = Table(
    "fingerprint",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("stage", String(32), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    # The state of an optimizer is more than one table.
    Column("table", String(64), primary_key=True),
    Column("arrival", BigInteger, nullable=False),
    # Number of tensors, T, and of columns of a sketch, K; 0 where there are no sketches.
    Column("tensors", Integer, nullable=False),
    Column("buckets", Integer, nullable=False),
    Column("content", LargeBinary, nullable=False),
    # As for chunks.
    Index(None, "run", "arrival"),
)

# What fingerprints of a step say, each once: the replicas of a healthy job all say the same.
print_content = Table(
    "print_content",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    # See `fingerprints.content_of`.
    Column("content", LargeBinary, primary_key=True),
    # uint64 [T], float64 [T, K].
    Column("digests", LargeBinary, nullable=False),
    Column("sketches", LargeBinary, nullable=True),
)

# Comparisons of the ranks, run-length encoded: a row holds from `step` until `until_step`.
comparison = Table(
    "comparison",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("stage", String(32), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("until_step", BigInteger, nullable=False),
    # Number of compared steps in it.
    Column("checked", Integer, nullable=False),
    Column("equal", Boolean, nullable=False),
    Column("decided", Boolean, nullable=False),
    Column("ranks", LargeBinary, nullable=False),
    Column("clusters", LargeBinary, nullable=False),
    Column("distance", LargeBinary, nullable=False),
    Column("relative", LargeBinary, nullable=False),
    Column("tensors", JSON, nullable=False),
    Column("tensor_count", Integer, nullable=False),
    Column("missing", JSON, nullable=False),
    # Pages of the divergence of all stages in the order of steps.
    Index(None, "run", "step"),
)

alert = Table(
    "alert",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String(32), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("key", String(250), nullable=False),
    Column("severity", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("title", Text, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("seen_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("resolved_at", Float, nullable=True),
    # Whether somebody has, and until when that holds; NULL: for ever. Written by routes alone.
    Column("acknowledged", Boolean, nullable=False),
    Column("acknowledged_by", Text, nullable=False, server_default=""),
    Column("acknowledged_why", Text, nullable=False, server_default=""),
    Column("acknowledged_at", Float, nullable=True),
    Column("acknowledged_until", Float, nullable=True),
    Column("ranks", JSON, nullable=False),
    Column("tensors", JSON, nullable=False),
    Column("stage", String(32), nullable=True),
    Column("clear_after", BigInteger, nullable=True),
    Column("cause", Text, nullable=False),
    Column("remedy", Text, nullable=False),
    Column("evidence", JSON, nullable=False),
    Column("parent", String(32), nullable=True),
    Column("consequences", JSON, nullable=False),
    # Number of the start of the job in which it was found.
    Column("start", Integer, nullable=False, server_default="0"),
    # Newest first, over all runs.
    Index(None, "opened_at"),
    # An alert by its id alone.
    Index(None, "id"),
)

# What happened to an alert, and why.
alert_event = Table(
    "alert_event",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("alert", String(32), primary_key=True),
    Column("n", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, nullable=False),
    Column("at", Float, nullable=False),
    Column("what", String(32), nullable=False),
    Column("reason", Text, nullable=False),
)

# Each detector's answer for the run as it stands.
check = Table(
    "finding_check",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(64), primary_key=True),
    Column("status", String(24), nullable=False),
    Column("why", Text, nullable=False),
)

silence = Table(
    "silence",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String(32), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    # NULL: for ever.
    Column("until", Float, nullable=True),
    # Why, and who says so.
    Column("comment", Text, nullable=False),
    Column("name", Text, nullable=False, server_default=""),
)

# What each run is judged by: all settings of the detectors as they were at the first check of it.
judged_by = Table(
    "judged_by",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("settings", JSON, nullable=False),
)

# What somebody set for the detectors of a project's runs to come.
project_settings = Table(
    "project_settings",
    metadata,
    Column("project", String(250), primary_key=True),
    Column("settings", JSON, nullable=False),
    Column("changed_at", Float, nullable=False),
)

# Who may do what; see `tokens.py`.
access_token = Table(
    "access_token",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(250), nullable=False),
    # SHA-256 of the secret, as hexadecimal digits.
    Column("digest", String(64), nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    # NULL: all.
    Column("projects", JSON(none_as_null=True), nullable=True),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=True),
    Column("revoked_at", Float, nullable=True),
)

# Who is told of alerts; see `notifications.py`.
notification_target = Table(
    "notification_target",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(250), nullable=False),
    # With whatever password is in it.
    Column("url", Text, nullable=False),
    # NULL: all.
    Column("projects", JSON(none_as_null=True), nullable=True),
    Column("kinds", JSON(none_as_null=True), nullable=True),
    Column("severity", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
)

# What each of them has been told of an alert, and when it is to be told more.
notification = Table(
    "notification",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("alert", String(32), primary_key=True),
    Column("target", String(16), primary_key=True),
    # Severity that was told last, or `resolved`; empty: nothing yet.
    Column("told", String(16), nullable=False),
    Column("told_at", Float, nullable=True),
    # NULL: nothing is to be told.
    Column("due_at", Float, nullable=True),
    # Since when, and how often it was tried in vain, and what was said to the last try.
    Column("wanted_at", Float, nullable=True),
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("error", Text, nullable=False, server_default=""),
)
# The notifier asks every few seconds: a few of many.
Index(
    "ix_notification_due",
    notification.c.due_at,
    sqlite_where=notification.c.due_at.is_not(None),
    postgresql_where=notification.c.due_at.is_not(None),
)

# Servers that evaluate, each with the time up to which it is taken to live.
server = Table(
    "server",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("until", Float, nullable=False),
)

# Which of them evaluates a run. `number` rises with every change of hands: who writes by an older
# one has lost it.
lease = Table(
    "lease",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    # Empty: nobody.
    Column("server", String(64), nullable=False),
    Column("number", BigInteger, nullable=False),
)

# What the evaluation of a run had come to after everything up to `arrival`; see `snapshot.py`.
snapshot = Table(
    "snapshot",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    # Of the code that made it.
    Column("version", String(32), nullable=False),
    Column("arrival", BigInteger, nullable=False),
    Column("state", LargeBinary, nullable=False),
)

# What ranks say once: faults of the agent, markers.
event = Table(
    "event",
    metadata,
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("arrival", BigInteger, primary_key=True, autoincrement=False),
    Column("n", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, nullable=False),
    # NULL where nobody noted it.
    Column("attempt", Integer, nullable=True),
    Column("step", BigInteger, nullable=False),
    Column("at", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Column("data", JSON, nullable=False),
)
