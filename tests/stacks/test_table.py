"""The table of the stacks is what was found."""

import importlib.util
import json

from tests.support.stacks import REPOSITORY, stacks

DOCS = REPOSITORY / "docs" / "stacks"


def test_the_table_is_made_of_the_results():
    spec = importlib.util.spec_from_file_location("table", DOCS / "table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert (DOCS / "README.md").read_text(encoding="utf-8") == table.page(), (
        "call `python -m docs.stacks.table`"
    )


def test_what_is_reported_wrongly_is_named_as_a_gap():
    results = json.loads((DOCS / "results.json").read_text(encoding="utf-8"))
    known = {stack.name: stack for stack in stacks()}
    assert results.keys() <= known.keys()
    for name, found in results.items():
        wrong = {case for case, outcome in found["cases"].items() if not outcome["right"]}
        assert wrong == set(known[name].gaps) == set(found["gaps"]), name


def test_a_user_adds_three_lines_at_most():
    for path in DOCS.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        if path.name != "README.md":
            first = text.split("```python\n")[1].split("```")[0]
            assert sum(map(bool, first.splitlines())) <= 3, path.name
