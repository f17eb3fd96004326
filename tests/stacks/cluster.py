"""Starts one process for each worker, as people do who write TF_CONFIG themselves.

cluster.py WORKERS SCRIPT ARGUMENT ...
"""

import json
import os
import subprocess
import sys

from rankscope.server.demo.processes import free_port


def main() -> int:
    """0 where all ended well."""
    count, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(count)]}
    left = {}
    for index in range(count):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        environ = {**os.environ, "TF_CONFIG": json.dumps(task)}
        started = subprocess.Popen(command, env=environ)
        left[started.pid] = started
    failed = 0
    while left:
        pid, status = os.wait()
        left.pop(pid).returncode = os.waitstatus_to_exitcode(status)
        if status and not failed:
            failed = 1
            # The others wait for it, some of them for ever.
            for process in left.values():
                process.terminate()
    return failed


if __name__ == "__main__":
    sys.exit(main())
