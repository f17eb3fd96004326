"""Runs, their ranks, and what agents say once."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Float, Index, Integer, String, Table, Text, text

from rankscope.server.storage.schema.base import Key, metadata

# The key of each run's name. Apart from `run`: a table that is distributed by key cannot make sure
# that a name is given once. Keys ascend with time and are never given again.
run_name = Table(
    "run_name",
    metadata,
    Column("key", Key, primary_key=True, autoincrement=True),
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
    # By what lists are sorted, as it was when it was judged last: the verdict, and the median of
    # the ranks' newest losses, the largest number there is for one that is not finite; NULL for
    # none.
    Column("verdict", String(16), nullable=True),
    Column("loss", Float, nullable=True),
    # Whether others of the project are compared with it: `passed` (the server says so), `marked` or
    # `unmarked` (a person does); NULL: not.
    Column("baseline", String(16), nullable=True),
    # Words by which people find it again, by name, each between two line breaks, so that one is
    # found by a search for it with both; NULL until the job or a person has named any.
    Column("tags", Text, nullable=True),
    # When that is to be judged again (seconds since 1970); NULL: not before something changes.
    Column("judge_at", Float, nullable=True, server_default="0"),
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
# And which are to be judged again for the lists.
Index(
    "ix_run_judge_at",
    run.c.judge_at,
    sqlite_where=run.c.judge_at.is_not(None),
    postgresql_where=run.c.judge_at.is_not(None),
)
# And which are baselines of a project: some of many.
Index(
    "ix_run_baseline",
    run.c.project,
    run.c.started_at,
    run.c.key,
    sqlite_where=run.c.baseline.is_not(None),
    postgresql_where=run.c.baseline.is_not(None),
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
    # Since which boot of its machine `steady` counts: seconds until it began, by a clock that
    # nobody sets. `set_ahead` is what its other clock, that of `sent_at`, was ahead of it then.
    Column("boot", String(64), nullable=False, server_default=""),
    Column("steady", Float, nullable=False, server_default="0"),
    Column("set_ahead", Float, nullable=False, server_default="0"),
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
