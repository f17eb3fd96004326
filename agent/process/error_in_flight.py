"""The error by which a `finally` or a `with` is being left: what is closed there has failed."""

from __future__ import annotations

import ast
import linecache
import sys
from types import FrameType


def error_in_flight() -> BaseException | None:
    """What is on its way up through a function that has called this one, at whatever distance.

    An error that an `except` has caught is not on its way, nor is one that a function further up
    handles while it calls others: then what goes on is as good as any other. Where there is no
    source to tell (an interpreter that is typed into), nothing is known to be on its way.

    Raises:
        Exception: whatever a loader of sources raises: to be called by a probe of the guard.
    """
    error = sys.exc_info()[1]
    if error is None or error.__traceback__ is None or isinstance(error, GeneratorExit):
        return None
    if isinstance(error, SystemExit) and not error.code:
        return None
    # As far as the error has come: the function that is being left, and where it was raised there.
    left, raised = error.__traceback__.tb_frame, error.__traceback__.tb_lineno
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not left:
        frame = frame.f_back
    return error if frame is not None and _is_left_by_it(frame, raised) else None


def _is_left_by_it(frame: FrameType, raised: int) -> bool:
    """Whether a function is in a `finally`, or leaves a `with`, in which this line was raised."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    line = frame.f_lineno
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.With | ast.AsyncWith):
            # The lines of its head are where it is left, too.
            head = range(node.lineno, max(node.body[0].lineno, node.lineno + 1))
            if line in head and node.lineno <= raised <= (node.end_lineno or raised):
                return True
        elif isinstance(node, ast.Try | ast.TryStar) and node.finalbody:
            first, last = node.finalbody[0].lineno, node.finalbody[-1].end_lineno or line
            if first <= line <= last and node.lineno <= raised < first:
                return True
    return False
