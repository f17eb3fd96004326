"""Starts of a job under one run id: which processes and alerts belong to which.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def _number(name: str, kind: sa.types.TypeEngine[int]) -> sa.Column[int]:
    return sa.Column(name, kind, nullable=False, server_default="0")


def upgrade() -> None:
    op.add_column("run", _number("start", sa.Integer()))
    op.add_column("run", _number("first_start", sa.Integer()))
    op.add_column("run", sa.Column("resumed_step", sa.BigInteger(), nullable=True))
    op.add_column("attempt", sa.Column("first_step", sa.BigInteger(), nullable=True))
    op.add_column("attempt", _number("first_arrival", sa.BigInteger()))
    op.add_column("attempt", _number("start", sa.Integer()))
    op.add_column("alert", _number("start", sa.Integer()))
    op.add_column("event", sa.Column("attempt", sa.Integer(), nullable=True))
    # Where a restarted process began is not known; the first ones mostly began with the job.
    op.execute("UPDATE attempt SET first_step = 0 WHERE attempt = 0 AND last_step >= 0")


def downgrade() -> None:
    # All alerts and processes of a run are those of one start again.
    op.drop_column("event", "attempt")
    op.drop_column("alert", "start")
    op.drop_column("attempt", "start")
    op.drop_column("attempt", "first_arrival")
    op.drop_column("attempt", "first_step")
    op.drop_column("run", "resumed_step")
    op.drop_column("run", "first_start")
    op.drop_column("run", "start")
