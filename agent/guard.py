"""The only place in the agent that catches broadly.

A guest never breaks the house: what fails inside the agent disables the probe that failed, is
reported once, counted, and never reaches the trainer. Guard our own bookkeeping as narrowly as
possible, and never the user's call. `KeyboardInterrupt` and `SystemExit` pass.
"""

from __future__ import annotations

import functools
import logging
import traceback
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

_log = logging.getLogger("rankscope")

# Called with (probe, fault) for whatever is contained, before it is reported. The test suite puts
# a function here that turns contained faults into failures.
observers: list[Callable[[str, Exception], None]] = []


def _never() -> bool:
    return False


# Whether a device records what this thread gives it, to be done later and again (a CUDA graph):
# what ran of ours then would become a part of the trainer's graph, or end the recording with an
# error. So nothing does. Known by what knows the framework: see `quiet_while`.
_is_recording: Callable[[], bool] = _never


def quiet_while(is_recording: Callable[[], bool]) -> None:
    """What is guarded does nothing while the function says so.

    Args:
        is_recording: where it fails, that counts as no.
    """
    global _is_recording
    _is_recording = is_recording


def is_quiet() -> bool:
    """Whether nothing of ours may run now, in this thread; never raises."""
    try:
        return _is_recording()
    except Exception as fault:  # noqa: BLE001
        _contain_everywhere("recording", fault)
        return False


class Probe:
    """Contains the faults of one probe; a context manager that can be used again and nested.

        if probe.enabled:
            with probe:
                ...

    Nothing is allocated on the way in or out, so it may stand on the step path.

    Attributes:
        name: the probe's name in reports.
        enabled: False after `tolerance` faults.
        faults: number of faults contained so far.
    """

    __slots__ = ("_report", "_tolerance", "enabled", "faults", "name")

    def __init__(self, name: str, report: Callable[[str, str], None], tolerance: int = 1) -> None:
        self.name = name
        self.enabled = True
        self.faults = 0
        self._report = report
        self._tolerance = tolerance

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if fault is None:
            return False
        if not isinstance(fault, Exception):
            return False
        self.contain(fault)
        return True

    def __call__(self, function: Callable[Given, Result]) -> Callable[Given, Result | None]:
        """A function that does nothing once the probe is disabled, and never raises."""

        @functools.wraps(function)
        def guarded(*args: Given.args, **kwargs: Given.kwargs) -> Result | None:
            # As `with self`, without its two calls: some are the hooks of every tensor.
            if self.enabled and not is_quiet():
                try:
                    return function(*args, **kwargs)
                except Exception as fault:  # noqa: BLE001
                    self.contain(fault)
            return None

        return guarded

    def contain(self, fault: Exception) -> None:
        """Counts a fault, reports the first, and disables the probe when it is enough."""
        self.faults += 1
        if self.faults >= self._tolerance:
            self.enabled = False
        for observer in observers:
            observer(self.name, fault)
        if self.faults == 1:
            try:
                self._report(self.name, describe(fault))
            except Exception:  # noqa: BLE001
                # The report itself failed: the trainer must not get the error.
                self.enabled = False
                _log_fault(self.name, fault)


class Moments:
    """Calls one function of each of several probes, in order; the faults of each stay its own.

    Costs nothing where nothing fails: no context manager, and no question whether a probe still
    works, because one that does not is taken off the list.

    Args:
        calls: a function with the probe that answers for it.
    """

    __slots__ = ("_calls",)

    def __init__(self, calls: Iterable[tuple[Callable[..., Any], Probe]]) -> None:
        self._calls = tuple(calls)

    def __call__(self, *args: Any) -> None:
        """Calls them all; never raises."""
        for function, probe in self._calls:
            try:
                function(*args)
            except Exception as fault:  # noqa: BLE001
                probe.contain(fault)
                if not probe.enabled:
                    self._calls = tuple(c for c in self._calls if c[1].enabled)


def contained(method: Callable[..., None]) -> Callable[..., None]:
    """A method that never raises: what fails in it is for its object's `_bookkeeping` probe."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any) -> None:
        if is_quiet():
            return
        try:
            method(self, *args)
        except Exception as fault:  # noqa: BLE001
            self._bookkeeping.contain(fault)

    return wrapper


def contained_keywords(method: Callable[[Any, dict[str, Any]], None]) -> Callable[..., None]:
    """As `contained`, of a method that takes any keywords and gets them as one dictionary.

    A block `with self._bookkeeping` costs two calls, a sixth of what logging 20 numbers does.
    """

    def wrapper(self: Any, /, **given: Any) -> None:
        if is_quiet():
            return
        try:
            method(self, given)
        except Exception as fault:  # noqa: BLE001
            self._bookkeeping.contain(fault)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(wrapper, name, getattr(method, name))
    return wrapper


def process_wide(
    name: str,
) -> Callable[[Callable[Given, Result]], Callable[Given, Result | None]]:
    """Makes a function never raise that is called for no monitor in particular.

    For what is put into functions of the framework, which every model of the process goes through.
    Every monitor of the process reports what fails there.

    Args:
        name: of the probe that answers for it.
    """

    def decorated(function: Callable[Given, Result]) -> Callable[Given, Result | None]:
        @functools.wraps(function)
        def guarded(*args: Given.args, **kwargs: Given.kwargs) -> Result | None:
            if is_quiet():
                return None
            try:
                return function(*args, **kwargs)
            except Exception as fault:  # noqa: BLE001
                _contain_everywhere(name, fault)
                return None

        return guarded

    return decorated


def attempt(
    function: Callable[[], Result],
    *,
    name: str,
    report: Callable[[str], None] = lambda text: None,
) -> Result | None:
    """What the function returns, or None where it fails; for what runs before there is a guard.

    Args:
        function: what is attempted.
        name: of the part, in the log.
        report: is called as well.
    """
    try:
        return function()
    except Exception as fault:  # noqa: BLE001
        for observer in observers:
            observer(name, fault)
        _log_fault(name, fault)
        report(f"{name}: {describe(fault)}")
        return None


class Guard:
    """The probes of one monitor, or of its sender.

    Args:
        report: called with (probe, text) once for each probe that fails.
        everywhere: whether it is also called for what fails for the process as a whole.
    """

    def __init__(self, report: Callable[[str, str], None], *, everywhere: bool = False) -> None:
        self._report = report
        self._probes: dict[str, Probe] = {}
        if everywhere:
            _guards.add(self)

    def probe(self, name: str, *, tolerance: int = 1) -> Probe:
        """The probe of that name, made on first use; `tolerance` counts then only.

        Args:
            name: as it stands in reports.
            tolerance: number of faults after which it is disabled.
        """
        try:
            return self._probes[name]
        except KeyError:
            return self._probes.setdefault(name, Probe(name, self._report, tolerance))

    def enabled(self, name: str) -> bool:
        """Whether that probe still works (or has not been used yet)."""
        probe = self._probes.get(name)
        return probe is None or probe.enabled

    def retire(self) -> None:
        """All is over: what could not be taken back, a hook for example, does nothing any more."""
        _guards.discard(self)
        for probe in list(self._probes.values()):
            probe.enabled = False

    @property
    def faults(self) -> dict[str, int]:
        """Number of contained faults by probe, without those that have none."""
        return {name: probe.faults for name, probe in list(self._probes.items()) if probe.faults}


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _contain_everywhere(name: str, fault: Exception) -> None:
    """What fails for the process as a whole: every monitor reports it."""
    guards = list(_guards)
    for guard in guards:
        guard.probe(name).contain(fault)
    if not guards:
        _log_fault(name, fault)


def _log_fault(name: str, fault: Exception) -> None:
    try:
        text = "rankscope: a part of the agent failed, training goes on: %s: %s"
        _log.warning(text, name, describe(fault))
    except Exception:  # noqa: BLE001 - a handler of the trainer's logging
        return


def message_of(fault: BaseException) -> str:
    """Type and message."""
    try:
        text = str(fault)
    except Exception:  # noqa: BLE001 - any class may have a broken __str__
        text = "(its message cannot be read)"
    return f"{type(fault).__name__}: {text}"


def describe(fault: BaseException) -> str:
    """One line: type, message and the innermost place."""
    frames = traceback.extract_tb(fault.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{message_of(fault)}{place}".replace("\n", " ")[:1000]
