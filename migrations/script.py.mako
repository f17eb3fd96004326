"""${message}

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}

Rules: import alembic and sqlalchemy only, never the application (its tables change, history does
not). The server before and the server after must both work on the schema: add first, use later,
drop last. No statement that locks a large table for long. Write `downgrade` and rehearse it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
