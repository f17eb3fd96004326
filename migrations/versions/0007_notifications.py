"""Notifications: who is told of alerts, and what they have been told.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "notification_target",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=250), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("projects", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("kinds", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notification_target")),
    )
    op.create_table(
        "notification",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("alert", sa.String(length=32), nullable=False),
        sa.Column("target", sa.String(length=16), nullable=False),
        sa.Column("told", sa.String(length=16), nullable=False),
        sa.Column("told_at", sa.Float(), nullable=True),
        sa.Column("due_at", sa.Float(), nullable=True),
        sa.Column("wanted_at", sa.Float(), nullable=True),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("run", "alert", "target", name=op.f("pk_notification")),
    )
    due = sa.column("due_at").is_not(None)
    op.create_index(
        "ix_notification_due",
        "notification",
        ["due_at"],
        sqlite_where=due,
        postgresql_where=due,
    )


def downgrade() -> None:
    op.drop_table("notification")
    op.drop_table("notification_target")
