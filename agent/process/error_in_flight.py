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
    """
    error = sys.exc_info()[1]
    if error is None or error.__traceback__ is None or isinstance(error, GeneratorExit):
        return None
    if isinstance(error, SystemExit) and not error.code:
        return None
    # As far as the error has come: the function that is being left.
    left = error.__traceback__.tb_frame
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not left:
        frame = frame.f_back
    return error if frame is not None and _is_left_by_it(frame) else None


def _is_left_by_it(frame: FrameType) -> bool:
    """Whether a function is at a `finally`, or at the end of a `with`."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return False
    found, line = False, frame.f_lineno
    # Outer ones come first: the innermost has the last word.
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            # The line of its head is where it is left, too.
            found |= node.lineno == line
        elif isinstance(node, ast.Try):
            found |= _holds(node.finalbody, line)
            found &= not any(_holds(handler.body, line) for handler in node.handlers)
    return found


def _holds(body: list[ast.stmt], line: int) -> bool:
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or line)
