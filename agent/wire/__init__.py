"""What a rank reports to the server: the batch, its bytes, its limits, and the names both ends use.

The lighter end owns the wire: the server imports this module, never the other way round, and it
imports nothing of ours. Rules that keep old bytes readable for ever (`tests/wire/golden`):
`VERSION` grows when a field changes its meaning, or a new one must not be overlooked; any other new
field is optional and has a default; a field that is not known is ignored. A batch says the first
version that can read it.

Two forms carry the same batch. msgpack is what the agent sends: arrays are raw little-endian
bytes. JSON is for people and scripts: arrays are lists, the three non-finite numbers are the
strings `"NaN"`, `"Infinity"`, `"-Infinity"`, and 64-bit digests are hexadecimal strings.
"""

from rankscope.agent.wire import limits, tags
from rankscope.agent.wire.batch import (
    Answer,
    Array,
    Batch,
    Column,
    Event,
    Fingerprint,
    Float64,
    Hello,
    Int64,
    Layers,
    Row,
    TensorTable,
    UInt64,
)
from rankscope.agent.wire.codec import (
    CONTENT_TYPE,
    MAX_BODY_BYTES,
    VERSION,
    decode,
    decode_json,
    encode,
    from_json,
    table_to_json,
    to_json,
)
from rankscope.agent.wire.fields import MAX_COLUMNS, MAX_NAME_LENGTH, WireError
from rankscope.agent.wire.limits import LIMITS, Limit
from rankscope.agent.wire.names import (
    BATCH_PART,
    LABELS,
    NO_SAMPLE,
    PROFILES,
    RANK_LOCAL,
    RANK_STATES,
    SAMPLE_DIGESTS,
    SAMPLES_REPORTED,
    SEVERITIES,
    STAGES,
)
from rankscope.agent.wire.peek import run_of
from rankscope.agent.wire.plain import number_to_json, numbers_to_json
from rankscope.agent.wire.rows import columns_of, in_columns

__all__ = [
    "CONTENT_TYPE",
    "LIMITS",
    "MAX_BODY_BYTES",
    "MAX_COLUMNS",
    "MAX_NAME_LENGTH",
    "BATCH_PART",
    "LABELS",
    "NO_SAMPLE",
    "PROFILES",
    "RANK_LOCAL",
    "RANK_STATES",
    "SAMPLES_REPORTED",
    "SAMPLE_DIGESTS",
    "SEVERITIES",
    "STAGES",
    "VERSION",
    "Answer",
    "Array",
    "Batch",
    "Column",
    "Event",
    "Fingerprint",
    "Float64",
    "Hello",
    "Int64",
    "Layers",
    "Limit",
    "Row",
    "TensorTable",
    "UInt64",
    "WireError",
    "columns_of",
    "decode",
    "decode_json",
    "encode",
    "from_json",
    "in_columns",
    "limits",
    "number_to_json",
    "numbers_to_json",
    "run_of",
    "table_to_json",
    "tags",
    "to_json",
]
