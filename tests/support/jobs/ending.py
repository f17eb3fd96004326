"""How a process of a test that used gloo ends."""

import os
import sys


def end_at_once(*queues):
    """Ends this process, once what it put into the queues has been sent, without shutting down.

    Threads of gloo that want the interpreter while it shuts down abort the process in some runs
    ("terminate called without an active exception"), with nothing of ours in it.
    """
    for queue in queues:
        queue.close()
        queue.join_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
