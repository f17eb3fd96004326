"""Runs: the verdict and the loss that lists are sorted by, and when they are judged again.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("verdict", sa.String(length=16), nullable=True))
    op.add_column("run", sa.Column("loss", sa.Float(), nullable=True))
    # 0 is long ago: the runs that are there are judged when a server starts, a few at a time.
    op.add_column("run", sa.Column("judge_at", sa.Float(), server_default="0", nullable=True))
    op.create_index(
        "ix_run_judge_at",
        "run",
        ["judge_at"],
        sqlite_where=sa.text("judge_at IS NOT NULL"),
        postgresql_where=sa.text("judge_at IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_run_judge_at", table_name="run")
    op.drop_column("run", "judge_at")
    op.drop_column("run", "loss")
    op.drop_column("run", "verdict")
