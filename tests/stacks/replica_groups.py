"""Starts a lighthouse and one job of torchrun's for each replica group, as torchft's users do.

replica_groups.py GROUPS SCRIPT ARGUMENT ...
"""

import os
import subprocess
import sys

from torchft.coordination import LighthouseServer


def main() -> int:
    """0 where all ended well."""
    count, *script = sys.argv[1:]
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=int(count))
    started = [
        subprocess.Popen(
            ["torchrun", "--standalone", "--nproc-per-node=1", *script],
            env={
                **os.environ,
                "TORCHFT_LIGHTHOUSE": lighthouse.address(),
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": count,
            },
        )
        for group in range(int(count))
    ]
    failed = max(process.wait() for process in started)
    lighthouse.shutdown()
    return failed


if __name__ == "__main__":
    sys.exit(main())
