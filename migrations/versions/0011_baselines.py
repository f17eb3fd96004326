"""Runs: whether others of the project are compared with it, and who says so.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("baseline", sa.String(length=16), nullable=True))
    op.create_index(
        "ix_run_baseline",
        "run",
        ["project", "started_at", "key"],
        sqlite_where=sa.text("baseline IS NOT NULL"),
        postgresql_where=sa.text("baseline IS NOT NULL"),
    )
    # The runs that have passed already are judged anew, a few at a time, and taken then.
    op.execute("UPDATE run SET judge_at = 0 WHERE verdict = 'pass'")


def downgrade() -> None:
    op.drop_index("ix_run_baseline", table_name="run")
    op.drop_column("run", "baseline")
