"""Whose batch it is, from its first bytes: known before the rest is worth decoding."""

from __future__ import annotations

import msgpack

# A project's name in the longest form comes before the run's.
_BYTES = 4096
# The encoder writes it as the third field.
_FIELDS = 8


def run_of(data: bytes) -> str | None:
    """The run that a batch of msgpack names among its first fields; None where it does not."""
    try:
        unpacker = msgpack.Unpacker(raw=False, max_buffer_size=_BYTES)
        unpacker.feed(data[:_BYTES])
        for _ in range(min(unpacker.read_map_header(), _FIELDS)):
            if unpacker.unpack() == "run":
                run = unpacker.unpack()
                return run if isinstance(run, str) else None
            unpacker.skip()
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException):
        return None
    return None
