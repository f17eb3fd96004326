"""What is said of a run of one process does not speak of ranks that are not there."""

import re

import pytest

from rankscope.server.window import Status
from tests.server.detectors.test_cases import BY_NAME, load
from tests.support.judging import judge
from tests.support.runs.alone import Alone
from tests.support.runs.scenarios import GENERATORS

OTHERS = re.compile(r"\b(every|each|all \d+|other|no other|another) rank\b|\branks\b", re.I)


def _cases():
    seen = set()
    for case in load():
        kind, detector, what = case.values
        arguments = repr(what.get("with", {}))
        key = (detector, what["generator"], arguments)
        if BY_NAME[detector].min_ranks > 1 or what["finds"] == "nothing" or key in seen:
            continue
        seen.add(key)
        yield pytest.param(detector, what, id=case.id)


@pytest.mark.parametrize(("detector", "case"), list(_cases()))
def test_texts_of_one_process_name_no_other_rank(detector, case):
    made = GENERATORS[case["generator"]](case.get("seed", 0), **case.get("with", {}))
    found = judge(Alone(made), [BY_NAME[detector]()], range(0, 2000, 33))
    texts = [text for a in found.alerts for text in (a.title, a.cause, a.remedy)]
    texts += [c.why for c in found.checks.values() if c.status is not Status.NOT_APPLICABLE]
    assert [text for text in texts if OTHERS.search(text)] == []
