"""Settings of detectors: of projects, and those by which each run is judged.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "judged_by",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run", name=op.f("pk_judged_by")),
    )
    op.create_table(
        "project_settings",
        sa.Column("project", sa.String(length=250), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_project_settings")),
    )


def downgrade() -> None:
    op.drop_table("project_settings")
    op.drop_table("judged_by")
