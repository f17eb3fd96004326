"""Adapters for frameworks are there when asked for, and cost nothing before."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope import agent
from rankscope.agent import integrations


def frameworks(path):
    """Packages that an adapter tries to import."""
    tried = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Try)]
    found = set()
    for node in (inner for outer in tried for inner in outer.body):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found


ADAPTERS = {path.stem: frameworks(path) for path in Path(integrations.__file__).parent.glob("*.py")}
NEEDED = {name: needed for name, needed in sorted(ADAPTERS.items()) if needed}


def test_adapters_are_read_rightly():
    assert NEEDED["keras"] == {"keras", "tensorflow"}
    assert NEEDED["lightning"] == {"lightning", "pytorch_lightning"}
    assert ADAPTERS["parameter_server"] == set()


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_framework_is_told_with_what_helps(name, monkeypatch):
    for package in NEEDED[name]:
        for known in [m for m in sys.modules if m.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, known)
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"rankscope.agent.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"^agent\.{name} needs .+: pip install "):
        getattr(agent, name)


def test_what_is_no_adapter_is_no_attribute():
    with pytest.raises(AttributeError, match="no_such_framework"):
        agent.no_such_framework  # noqa: B018


def test_an_adapter_leaves_the_functions_in_their_places():
    # What a module imports is bound in the package, which has functions of the same names.
    told = "from rankscope import agent; agent.parameter_server; print(callable(agent.start))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
