"""Short rows of points are merged; which of their steps came when is kept separately.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "merged_chunk",
        sa.Column("run", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("layout", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("first_step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("arrival", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("last_arrival", sa.BigInteger(), nullable=False),
        sa.Column("parts", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(
            "run", "layout", "rank", "first_step", "arrival", name=op.f("pk_merged_chunk")
        ),
    )
    op.create_index(
        op.f("ix_merged_chunk_run_last_arrival"),
        "merged_chunk",
        ["run", "last_arrival"],
        unique=False,
    )
    op.add_column("rollup_mark", sa.Column("merges", sa.LargeBinary(), nullable=True))
    # Servers check the runs that are there once more, and merge what they find.
    op.execute("UPDATE rollup_mark SET pending = true")


def downgrade() -> None:
    # Rows that were merged stay so: what reads them by steps sees no difference, and an evaluation
    # that begins anew takes all of their steps for what came with the first one.
    op.drop_column("rollup_mark", "merges")
    op.drop_index(op.f("ix_merged_chunk_run_last_arrival"), table_name="merged_chunk")
    op.drop_table("merged_chunk")
