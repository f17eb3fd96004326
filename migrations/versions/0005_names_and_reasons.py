"""Who silenced a kind and why, and who acknowledged an alert, when, why and until when.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, server_default="")


def upgrade() -> None:
    op.add_column("silence", _text("name"))
    op.add_column("alert", _text("acknowledged_by"))
    op.add_column("alert", _text("acknowledged_why"))
    op.add_column("alert", sa.Column("acknowledged_at", sa.Float(), nullable=True))
    op.add_column("alert", sa.Column("acknowledged_until", sa.Float(), nullable=True))


def downgrade() -> None:
    # An acknowledgement that has an end holds for ever again.
    op.drop_column("alert", "acknowledged_until")
    op.drop_column("alert", "acknowledged_at")
    op.drop_column("alert", "acknowledged_why")
    op.drop_column("alert", "acknowledged_by")
    op.drop_column("silence", "name")
