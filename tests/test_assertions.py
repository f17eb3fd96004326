"""Every test can fail: it asserts something, itself or by a helper of the tests that does.

A call of `pytest.raises`, `warns` or `fail` is an assertion, and so are Playwright's `expect` and
whatever is called `assert_...` (numpy, torch). To wait for something is none, even if it gives up
in the end: a test has to say what was to be found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
OF_LIBRARIES = {"raises", "warns", "fail", "expect"}
# Give up at last with an assertion of their own, which says of a test only that it took too long.
WAITING = {"wait_until", "wait_for", "wait_until_evaluated"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module:
    """Functions of a module of tests, and whence it has its other names."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.functions = {n.name: n for n in tree.body if isinstance(n, FUNCTION)}
        self.methods = [
            method
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            for method in node.body
            if isinstance(method, FUNCTION)
        ]
        # Name here -> module, name there.
        self.imported = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def tests(self) -> Iterator[Function]:
        """Functions and methods that pytest collects."""
        for function in (*self.functions.values(), *self.methods):
            if function.name.startswith("test_"):
                yield function


class Suite:
    """Says of functions whether they assert; modules by their dotted names."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.modules = {name: Module(source) for name, source in sources.items()}
        # A method is known by its name alone: where all of that name assert, its call does.
        named: dict[str, list[bool]] = {}
        for module in self.modules.values():
            for method in module.methods:
                named.setdefault(method.name, []).append(asserts(method))
        self.asserting_methods = {name for name, found in named.items() if all(found)}

    def asserts(self, of: str, function: Function, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a function of module `of` asserts, or calls one that does."""
        if asserts(function):
            return True
        for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
            if isinstance(call.func, ast.Attribute):
                if call.func.attr in self.asserting_methods - WAITING:
                    return True
            elif isinstance(call.func, ast.Name) and call.func.id not in WAITING:
                module, name = self.modules[of].imported.get(call.func.id, (of, call.func.id))
                found = self.modules[module].functions.get(name) if module in self.modules else None
                place = f"{module}.{name}"
                if found and place not in seen and self.asserts(module, found, seen | {place}):
                    return True
        return False

    def without(self) -> list[str]:
        """Tests that assert nothing."""
        return [
            f"{name}:{test.lineno} {test.name}"
            for name, module in self.modules.items()
            for test in module.tests()
            if not self.asserts(name, test)
        ]


def asserts(function: Function) -> bool:
    """Whether a function has an assertion in its own lines."""
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and is_assertion(name_of(node.func)))
        for node in ast.walk(function)
    )


def is_assertion(name: str) -> bool:
    """Whether a call of that name is one, whoever made it."""
    return name in OF_LIBRARIES or name.startswith("assert_")


def name_of(called: ast.expr) -> str:
    """The last part of what is called: `raises` of `pytest.raises`."""
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def test_every_test_asserts_something():
    sources = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path.read_text("utf-8")
        for path in sorted(TESTS.rglob("*.py"))
    }
    suite = Suite(sources)
    assert sum(1 for module in suite.modules.values() for _ in module.tests()) > 1000
    assert suite.without() == []


HELPERS = """
def wait_until(condition):
    assert condition()

def arrived(found):
    assert found

def opened():
    return []

class House:
    def reported_once(self):
        assert self

    def close(self):
        assert self

class Door:
    def close(self):
        return None
"""
HEAD = """
import pytest
from playwright.sync_api import expect
from tests.helpers import House, arrived as came, opened, wait_until

def mine(found):
    came(found)

def endless():
    endless()

"""


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ("assert opened() == []", True),
        ("with pytest.raises(OSError): opened()", True),
        ("expect(page).to_contain_text('x')", True),
        ("np.testing.assert_array_equal(opened(), [])", True),
        ("came(opened())", True),
        ("mine(opened())", True),
        ("house.reported_once()", True),
        ("opened()", False),
        ("endless()", False),
        ("house.close()", False),
        ("wait_until(lambda: opened())", False),
        ("page.wait_for_selector('x')", False),
    ],
)
def test_what_is_taken_for_an_assertion(body, taken):
    sources = {"tests.helpers": HELPERS, "tests.test_it": f"{HEAD}def test_it():\n    {body}\n"}
    found = [place.partition(" ")[2] for place in Suite(sources).without()]
    assert found == ([] if taken else ["test_it"])
