"""The tables, as SQLAlchemy Core. The same on SQLite and PostgreSQL.

Every table that grows with the data has a primary key that starts with the run, and nothing on the
way of a batch joins across runs: so the tables can be distributed by run (`distribution.py`), or
cut into ranges of runs (`partitions.py`), as they are.

Points are stored as packed chunks, little-endian float64 or uint64 in a binary column: NaN and
infinities come back as they were (SQLite turns a NaN in a REAL column into NULL), and a point costs
8 bytes and its share of a row. docs/storage.md has the figures. Times are seconds since 1970, UTC.
"""

from __future__ import annotations

from rankscope.server.storage.schema.access import access_token
from rankscope.server.storage.schema.audit import audit
from rankscope.server.storage.schema.base import metadata
from rankscope.server.storage.schema.comparisons import comparison, fingerprint, print_content
from rankscope.server.storage.schema.findings import (
    alert,
    alert_event,
    check,
    judged_by,
    project_settings,
    silence,
)
from rankscope.server.storage.schema.notifications import notification, notification_target
from rankscope.server.storage.schema.runs import attempt, event, run, run_name
from rankscope.server.storage.schema.series import (
    chunk,
    layers,
    layout,
    merged_chunk,
    metric,
    rollup,
    rollup_mark,
    taken,
    tensor_table,
)
from rankscope.server.storage.schema.servers import lease, server, snapshot

__all__ = [
    "access_token",
    "alert",
    "alert_event",
    "attempt",
    "audit",
    "check",
    "chunk",
    "comparison",
    "event",
    "fingerprint",
    "judged_by",
    "layers",
    "layout",
    "lease",
    "merged_chunk",
    "metadata",
    "metric",
    "notification",
    "notification_target",
    "print_content",
    "project_settings",
    "rollup",
    "rollup_mark",
    "run",
    "run_name",
    "server",
    "silence",
    "snapshot",
    "taken",
    "tensor_table",
]
