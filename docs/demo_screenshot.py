"""Makes the pictures of the README from a demo run: `make screenshot`."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rankscope.server.demo.processes import RANKSCOPE, Process, free_port

HERE = Path(__file__).parent
_STAYS = re.compile(r"The dashboard stays at (\S+)/runs/(\S+) until")
# Minutes on an idle machine; nobody measures it here.
_DEADLINE_SECONDS = 3600.0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", default="bitflip")
    parser.add_argument("--seed", default="1")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "images" / "dashboard.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "demo.log"
        command = [*RANKSCOPE, "demo", "--fault", options.fault, "--seed", options.seed]
        command += ["--port", str(free_port())]
        with Process(command, log=log) as demo:
            server, run = _wait_for_the_end(demo)
            picture = [sys.executable, "-m", "docs.screenshot", server, run]
            return subprocess.call([*picture, "-o", str(options.output)], cwd=HERE.parent)


def _wait_for_the_end(demo: Process) -> tuple[str, str]:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline and demo.exit_code is None:
        if found := _STAYS.search(demo.tail(5)):
            return found[1], found[2]
        time.sleep(0.2)
    raise SystemExit(f"the demo did not come to its end:\n{demo.tail(40)}")


if __name__ == "__main__":
    sys.exit(main())
