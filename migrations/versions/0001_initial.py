"""Runs, attempts, batches, points, fingerprints, comparisons, alerts.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "alert",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=250), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("seen_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.Float(), nullable=False),
        sa.Column("resolved_at", sa.Float(), nullable=True),
        sa.Column("acknowledged", sa.Boolean(), nullable=False),
        sa.Column("ranks", sa.JSON(), nullable=False),
        sa.Column("tensors", sa.JSON(), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=True),
        sa.Column("clear_after", sa.BigInteger(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("remedy", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("parent", sa.String(length=32), nullable=True),
        sa.Column("consequences", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run", "id", name=op.f("pk_alert")),
    )
    op.create_index(op.f("ix_alert_id"), "alert", ["id"], unique=False)
    op.create_index(op.f("ix_alert_opened_at"), "alert", ["opened_at"], unique=False)
    op.create_table(
        "alert_event",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("alert", sa.String(length=32), nullable=False),
        sa.Column("n", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("what", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "alert", "n", name=op.f("pk_alert_event")),
    )
    op.create_table(
        "attempt",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("session", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("first_seq", sa.BigInteger(), nullable=False),
        sa.Column("end_seq", sa.BigInteger(), nullable=False),
        sa.Column("taken_end", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("sent_at", sa.Float(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("host", sa.Text(), server_default="", nullable=False),
        sa.Column("pid", sa.Integer(), server_default="0", nullable=False),
        sa.Column("local_rank", sa.Integer(), server_default="0", nullable=False),
        sa.Column("launcher", sa.Text(), server_default="", nullable=False),
        sa.Column("wrapper", sa.Text(), server_default="", nullable=False),
        sa.Column("heartbeat_seconds", sa.Float(), server_default="5", nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("first_seen", sa.Float(), nullable=False),
        sa.Column("last_seen", sa.Float(), nullable=False),
        sa.Column("longest_gap", sa.Float(), server_default="0", nullable=False),
        sa.Column("typical_gap", sa.Float(), server_default="0", nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("through_step", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("phase", sa.String(length=32), server_default="", nullable=False),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("dropped", sa.JSON(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=True),
        sa.Column("hello_arrival", sa.BigInteger(), nullable=True),
        sa.Column("tables", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rank", "session", name=op.f("pk_attempt")),
    )
    op.create_table(
        "chunk",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("layout", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("first_step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("arrival", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("points", sa.Integer(), nullable=False),
        sa.Column("steps", sa.LargeBinary(), nullable=True),
        sa.Column("values", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(
            "run", "layout", "rank", "first_step", "arrival", name=op.f("pk_chunk")
        ),
    )
    op.create_index(op.f("ix_chunk_run_arrival"), "chunk", ["run", "arrival"], unique=False)
    op.create_table(
        "comparison",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("until_step", sa.BigInteger(), nullable=False),
        sa.Column("checked", sa.Integer(), nullable=False),
        sa.Column("equal", sa.Boolean(), nullable=False),
        sa.Column("decided", sa.Boolean(), nullable=False),
        sa.Column("ranks", sa.LargeBinary(), nullable=False),
        sa.Column("clusters", sa.LargeBinary(), nullable=False),
        sa.Column("distance", sa.LargeBinary(), nullable=False),
        sa.Column("relative", sa.LargeBinary(), nullable=False),
        sa.Column("tensors", sa.JSON(), nullable=False),
        sa.Column("tensor_count", sa.Integer(), nullable=False),
        sa.Column("missing", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run", "stage", "step", name=op.f("pk_comparison")),
    )
    op.create_index(op.f("ix_comparison_run_step"), "comparison", ["run", "step"], unique=False)
    op.create_table(
        "event",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("arrival", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("n", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run", "arrival", "n", name=op.f("pk_event")),
    )
    op.create_table(
        "finding_check",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=24), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "kind", name=op.f("pk_finding_check")),
    )
    op.create_table(
        "fingerprint",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("table", sa.String(length=64), nullable=False),
        sa.Column("arrival", sa.BigInteger(), nullable=False),
        sa.Column("tensors", sa.Integer(), nullable=False),
        sa.Column("buckets", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(
            "run", "stage", "step", "rank", "attempt", "table", name=op.f("pk_fingerprint")
        ),
    )
    op.create_index(
        op.f("ix_fingerprint_run_arrival"), "fingerprint", ["run", "arrival"], unique=False
    )
    op.create_table(
        "print_content",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("digests", sa.LargeBinary(), nullable=False),
        sa.Column("sketches", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("run", "step", "content", name=op.f("pk_print_content")),
    )
    op.create_table(
        "layers",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("metric", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("first_step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("arrival", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("points", sa.Integer(), nullable=False),
        sa.Column("tensors", sa.Integer(), nullable=False),
        sa.Column("steps", sa.LargeBinary(), nullable=True),
        sa.Column("values", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(
            "run", "metric", "rank", "first_step", "arrival", name=op.f("pk_layers")
        ),
    )
    op.create_table(
        "layout",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("metrics", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run", "id", name=op.f("pk_layout")),
    )
    op.create_table(
        "lease",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("server", sa.String(length=64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run", name=op.f("pk_lease")),
    )
    op.create_table(
        "metric",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=250), nullable=False),
        sa.Column("table", sa.String(length=64), server_default="", nullable=False),
        sa.Column("version", sa.String(length=32), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("run", "id", name=op.f("pk_metric")),
        sa.UniqueConstraint(
            "run",
            "kind",
            "name",
            "table",
            "version",
            name=op.f("uq_metric_run_kind_name_table_version"),
        ),
    )
    op.create_table(
        "rollup",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("metric", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("block", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first", sa.Integer(), nullable=False),
        sa.Column("buckets", sa.Integer(), nullable=False),
        sa.Column("offsets", sa.LargeBinary(), nullable=True),
        sa.Column("counts", sa.LargeBinary(), nullable=True),
        sa.Column("values", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run", "metric", "level", "rank", "block", name=op.f("pk_rollup")),
    )
    op.create_table(
        "rollup_mark",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("arrival", sa.BigInteger(), nullable=False),
        sa.Column("pending", sa.Boolean(), nullable=False),
        sa.Column("ranks", sa.LargeBinary(), nullable=False),
        sa.Column("touched", sa.LargeBinary(), nullable=False),
        sa.Column("touched_width", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run", name=op.f("pk_rollup_mark")),
    )
    op.create_table(
        "run",
        sa.Column("key", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=250), nullable=False),
        sa.Column("project", sa.String(length=250), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("last_seen_at", sa.Float(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("arrivals", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("evaluated", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("evaluated_step", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("dense_until", sa.BigInteger(), nullable=True),
        sa.Column("late", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("given_up", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_run")),
    )
    op.create_index(
        op.f("ix_run_project_started_at_key"), "run", ["project", "started_at", "key"], unique=False
    )
    op.create_index(op.f("ix_run_started_at_key"), "run", ["started_at", "key"], unique=False)
    op.create_index(
        "ix_run_running",
        "run",
        ["last_seen_at"],
        unique=False,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_run_unevaluated",
        "run",
        ["key"],
        unique=False,
        sqlite_where=sa.text("arrivals > evaluated"),
        postgresql_where=sa.text("arrivals > evaluated"),
    )
    op.create_table(
        "run_name",
        sa.Column(
            "key",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.String(length=250), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_run_name")),
        sa.UniqueConstraint("id", name=op.f("uq_run_name_id")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "server",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_server")),
    )
    op.create_table(
        "silence",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=True),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "id", name=op.f("pk_silence")),
    )
    op.create_table(
        "snapshot",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.String(length=32), nullable=False),
        sa.Column("arrival", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run", name=op.f("pk_snapshot")),
    )
    op.create_table(
        "taken",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("session", sa.String(length=64), nullable=False),
        sa.Column("first_seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("end_seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rank", "session", "first_seq", name=op.f("pk_taken")),
    )
    op.create_table(
        "tensor_table",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.String(length=32), nullable=False),
        sa.Column("tensors", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run", "version", name=op.f("pk_tensor_table")),
    )


def downgrade() -> None:
    op.drop_table("tensor_table")
    op.drop_table("taken")
    op.drop_table("snapshot")
    op.drop_table("silence")
    op.drop_table("server")
    op.drop_table("run_name")
    op.drop_index("ix_run_unevaluated", table_name="run")
    op.drop_index("ix_run_running", table_name="run")
    op.drop_index(op.f("ix_run_started_at_key"), table_name="run")
    op.drop_index(op.f("ix_run_project_started_at_key"), table_name="run")
    op.drop_table("run")
    op.drop_table("rollup_mark")
    op.drop_table("rollup")
    op.drop_table("metric")
    op.drop_table("lease")
    op.drop_table("layout")
    op.drop_table("layers")
    op.drop_table("print_content")
    op.drop_index(op.f("ix_fingerprint_run_arrival"), table_name="fingerprint")
    op.drop_table("fingerprint")
    op.drop_table("finding_check")
    op.drop_table("event")
    op.drop_index(op.f("ix_comparison_run_step"), table_name="comparison")
    op.drop_table("comparison")
    op.drop_index(op.f("ix_chunk_run_arrival"), table_name="chunk")
    op.drop_table("chunk")
    op.drop_table("attempt")
    op.drop_table("alert_event")
    op.drop_index(op.f("ix_alert_opened_at"), table_name="alert")
    op.drop_index(op.f("ix_alert_id"), table_name="alert")
    op.drop_table("alert")
