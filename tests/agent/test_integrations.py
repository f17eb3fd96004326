"""Adapters for frameworks are there when asked for, and cost nothing before."""

import sys

import pytest

from rankscope import agent


def test_a_missing_framework_is_told_with_what_helps(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    monkeypatch.delitem(sys.modules, "rankscope.agent.integrations.keras", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'rankscope\[tensorflow\]'"):
        _ = agent.keras
