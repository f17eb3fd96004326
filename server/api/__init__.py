"""The REST interface under /api/v1: parse, call, answer; no SQL."""
