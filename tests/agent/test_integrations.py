"""Adapters for frameworks are there when asked for, and cost nothing before."""

import ast
import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rankscope import agent
from rankscope.agent import integrations
from rankscope.agent.integrations._outer_optimizer import attach_outside


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
def test_a_missing_framework_is_reported_with_what_helps(name, monkeypatch):
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
    program = "from rankscope import agent; agent.parameter_server; print(callable(agent.start))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


class MasterCopies:
    """As DeepSpeed's and Megatron's: none of torch's, with one of torch's inside."""

    def __init__(self, model):
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1)

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self):
        self.inner.step()
        return 2.0


@pytest.mark.parametrize(
    "kept", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy], ids=["pickled", "copied"]
)
def test_an_optimizer_from_outside_is_kept_without_what_is_on_its_step(kept, tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = MasterCopies(model)
    options = {"server": "http://127.0.0.1:9", "spool": str(tmp_path), "mode": "offline"}
    monitor = attach_outside(model, optimizer, lambda norm: norm, **options)
    try:
        again = kept(optimizer)
        model(torch.ones(1, 3)).sum().backward()
        before = model.weight.detach().clone()
        assert again.step() == 2.0  # of its own copies of the parameters
        assert torch.equal(model.weight, before)
        assert b"rankscope" not in pickle.dumps(optimizer)
        assert optimizer.step() == 2.0
        assert not torch.equal(model.weight, before)
    finally:
        monitor.close()
