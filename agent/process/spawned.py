"""Processes that import the trainer's script without being a trainer."""

from __future__ import annotations

import multiprocessing


def in_helper() -> bool:
    """Whether the script is imported by a process that `multiprocessing` has just spawned.

    It does so for the functions that it is to call. A worker that loads data would attach there, in
    a script whose model is made outside of `if __name__ == "__main__"`, and report a rank that
    ends without a step. What is called in it afterwards (a rank of `mp.spawn`) is no import.
    """
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))
