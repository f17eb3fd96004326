"""Adapters for frameworks are there when asked for, and cost nothing before."""

import subprocess
import sys

import pytest

from rankscope import agent

NEEDED = {
    "accelerate": (("accelerate",), "pip install accelerate"),
    "jax": (("jax",), "pip install jax"),
    "keras": (("keras",), r"pip install 'rankscope\[tensorflow\]'"),
    "lightning": (("lightning", "pytorch_lightning"), "pip install lightning"),
    "transformers": (("transformers",), "pip install transformers"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_framework_is_told_with_what_helps(name, monkeypatch):
    needed, helps = NEEDED[name]
    for package in needed:
        for known in [m for m in sys.modules if m.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, known)
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"rankscope.agent.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=helps):
        getattr(agent, name)


def test_an_adapter_leaves_the_functions_in_their_places():
    # What a module imports is bound in the package, which has functions of the same names.
    told = "from rankscope import agent; agent.parameter_server; print(callable(agent.start))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
