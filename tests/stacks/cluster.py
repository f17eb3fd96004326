"""Starts the processes of a TensorFlow job, as people do who write TF_CONFIG themselves.

    cluster.py RANKS [--coordinated] SCRIPT ARGUMENT ...

One process for each rank; with `--coordinated`, a chief that runs the script, a parameter server
(together they are rank 0), and a worker for each further rank.
"""

import json
import os
import subprocess
import sys

from rankscope.server.demo.processes import free_port

_SERVE = """
import json, os, tensorflow as tf
plain = json.loads(os.environ["TF_CONFIG"])
task = plain["task"]
cluster = tf.train.ClusterSpec(plain["cluster"])
tf.distribute.Server(cluster, task["type"], task["index"], protocol="grpc").join()
"""


def main() -> int:
    """0 where all ended well."""
    count, *arguments = sys.argv[1:]
    coordinated = arguments[0] == "--coordinated"
    script = [sys.executable, *arguments[coordinated:]]
    if coordinated:
        roles = {"chief": 1, "worker": int(count) - 1, "ps": 1}
    else:
        roles = {"worker": int(count)}
    cluster = {role: [f"127.0.0.1:{free_port()}" for _ in range(n)] for role, n in roles.items()}
    left = {}
    for role, addresses in cluster.items():
        for index in range(len(addresses)):
            serves = coordinated and role != "chief"
            task = {"cluster": cluster, "task": {"type": role, "index": index}}
            started = subprocess.Popen(
                [sys.executable, "-c", _SERVE] if serves else script,
                env={**os.environ, "TF_CONFIG": json.dumps(task)},
            )
            left[started.pid] = started
    failed = 0
    while left:
        pid, status = os.wait()
        left.pop(pid).returncode = os.waitstatus_to_exitcode(status)
        if (status or coordinated) and not failed:
            # The others wait for it, some of them for ever; servers do so anyhow.
            failed = 1 if status else -1
            for process in left.values():
                process.terminate()
    return max(failed, 0)


if __name__ == "__main__":
    sys.exit(main())
