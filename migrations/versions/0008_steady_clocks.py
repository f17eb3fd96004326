"""Attempts: when a process began by its machine's steady clock, which nobody sets.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("attempt") as batch:
        batch.add_column(sa.Column("boot", sa.String(length=64), server_default="", nullable=False))
        batch.add_column(sa.Column("steady", sa.Float(), server_default="0", nullable=False))
        batch.add_column(sa.Column("set_ahead", sa.Float(), server_default="0", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("attempt") as batch:
        batch.drop_column("set_ahead")
        batch.drop_column("steady")
        batch.drop_column("boot")
