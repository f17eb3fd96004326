"""Answers for coding agents are short, whatever a run holds, and say what was left out."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rankscope.server.commands.mcp_answers import MOST_BYTES, bounded

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
)


@given(st.dictionaries(st.sampled_from(["evidence", "history"]), VALUES), st.integers(100, 2000))
def test_an_answer_fits(value, most):
    kept, shortened = bounded(value, most)
    assert len(json.dumps(kept)) <= most
    assert kept.keys() == value.keys()
    assert bool(shortened) == (kept != value)


def test_what_is_left_out_is_named():
    value = {"evidence": {"ranks": list(range(5000)), "text": "x" * 5000}, "history": [1, 2]}
    kept, shortened = bounded(value)
    assert kept["evidence"]["ranks"] == list(range(64))
    assert shortened == ["evidence.ranks: 64 of 5000", "evidence.text: a text of 5000 characters"]
    assert kept["history"] == [1, 2]
    rows = {"metrics": [{"values": list(range(200))} for _ in range(1000)]}
    kept, shortened = bounded(rows)
    assert len(json.dumps(kept)) <= MOST_BYTES
    assert shortened[0] == f"metrics: {len(kept['metrics'])} of 1000"
    assert len(shortened) <= 21
