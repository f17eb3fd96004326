"""Errors on their way through a `finally` or a `with`, and those that are caught."""

import contextlib

import pytest

from rankscope.agent.guard import Guard
from rankscope.agent.process.error_in_flight import error_in_flight


class Noted:
    """Remembers what was in flight as it was closed, asked as the monitor asks."""

    found: BaseException | None = None

    def close(self):
        self.found = Guard(lambda probe, text: None).probe("records")(error_in_flight)()


@pytest.fixture
def noted():
    return Noted()


def test_nothing_is_in_flight_where_nothing_was_raised(noted):
    try:
        pass
    finally:
        noted.close()
    assert noted.found is None


def test_an_error_on_its_way_through_a_finally(noted):
    def train():
        try:
            raise RuntimeError("broken")
        finally:
            noted.close()

    with pytest.raises(RuntimeError):
        train()
    assert str(noted.found) == "broken"


def test_an_error_on_its_way_through_functions_that_others_called(noted):
    def train():
        raise RuntimeError("broken")

    def whole():
        try:
            train()
        finally:
            if noted is not None:
                noted.close()

    with pytest.raises(RuntimeError):
        whole()
    assert str(noted.found) == "broken"


def test_an_error_that_leaves_a_with(noted):
    with pytest.raises(RuntimeError), contextlib.closing(noted):
        raise RuntimeError("broken")
    assert str(noted.found) == "broken"


def test_an_error_that_is_caught_ends_nothing(noted):
    try:
        raise RuntimeError("enough")
    except RuntimeError:
        noted.close()
    assert noted.found is None


def test_an_error_that_was_caught_before(noted):
    try:
        with contextlib.suppress(RuntimeError):
            raise RuntimeError("tried")
    finally:
        noted.close()
    assert noted.found is None


def test_an_error_that_a_caller_handles_by_calling_again(noted):
    def once_more():
        try:
            pass
        finally:
            noted.close()

    try:
        raise RuntimeError("the first try")
    except RuntimeError:
        once_more()
    assert noted.found is None


def test_a_training_that_is_tried_again_in_a_handler(noted):
    try:
        raise RuntimeError("the first try")
    except RuntimeError:
        try:
            pass
        finally:
            noted.close()
        again = Noted()
        with contextlib.closing(again):
            pass
    assert (noted.found, again.found) == (None, None)


def test_a_head_of_several_lines(noted):
    def train():
        with (
            contextlib.nullcontext(),
            contextlib.closing(noted),
        ):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        train()
    assert str(noted.found) == "broken"


@pytest.mark.contained
def test_a_source_that_cannot_be_had(noted, monkeypatch):
    def train():
        try:
            raise RuntimeError("broken")
        finally:
            noted.close()

    monkeypatch.setattr("linecache.getlines", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="broken"):
        train()
    assert noted.found is None


@pytest.mark.parametrize("code", [None, 0])
def test_leaving_with_success_is_no_error(noted, code):
    def train():
        try:
            raise SystemExit(code)
        finally:
            noted.close()

    with pytest.raises(SystemExit):
        train()
    assert noted.found is None


def test_code_without_a_source(noted):
    code = "try:\n    raise RuntimeError\nfinally:\n    noted.close()\n"
    with pytest.raises(RuntimeError):
        exec(compile(code, "<typed in>", "exec"), {"noted": noted})
    assert noted.found is None
