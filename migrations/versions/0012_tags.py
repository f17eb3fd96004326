"""Runs: tags, words by which people find them again.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("tags", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("run", "tags")
