"""Every stack: a healthy job without an alert, and faults that are found, named and dated.

Not a part of `make test`: `make test-stacks` installs what they need and runs them.
"""

import pytest

from tests.support.servers.service import Service
from tests.support.stacks import judged, keep, run, stacks

pytestmark = [pytest.mark.stacks, pytest.mark.e2e]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stack", stacks(), ids=lambda stack: stack.name)
def test_a_stack(stack, service, tmp_path):
    printed = run(stack, service.url, tmp_path)
    cases = judged(service.url, tmp_path)
    keep(stack, cases)
    assert sum(not case.expected.kinds for case in cases) == 1
    assert sum(bool(case.expected.kinds) for case in cases) >= 3
    wrong = {case.case: case.complaint for case in cases if case.complaint}
    unknown = [complaint for case, complaint in wrong.items() if case not in stack.gaps]
    assert not unknown, "\n".join([*unknown, printed[-2000:]])
    # A gap that is closed has to be struck out of its job file.
    assert wrong.keys() == stack.gaps.keys()
