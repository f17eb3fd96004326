"""The container files are what docker reads, and their commands do what they are there for."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope.server.demo.processes import RANKSCOPE, Process, free_port

FOLDER = Path(__file__).parent.parent / "examples" / "deployment"
DOCKERFILE = FOLDER / "Dockerfile"
BIN = Path(sys.executable).parent


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_linter_accepts_the_image():
    if not (BIN / "hadolint").exists():
        pytest.skip("no hadolint for this machine")
    found = run(BIN / "hadolint", DOCKERFILE)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_schema_accepts_the_services():
    schema = ["--builtin-schema", "vendor.compose-spec"]
    checked = run(BIN / "check-jsonschema", *schema, FOLDER / "compose.yaml")
    assert checked.returncode == 0, checked.stdout


def command(name):
    """The words of an instruction in its JSON form."""
    (found,) = re.findall(rf"^ *{name} (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)
    return json.loads(found)


def test_the_image_serves_once_there_is_a_token_and_is_healthy_then(tmp_path):
    port = free_port()
    database = f"sqlite:///{tmp_path / 'rankscope.db'}"
    program, *options = command("ENTRYPOINT")
    assert program == "rankscope"
    # What follows the image's name counts.
    serve = [*RANKSCOPE, *options, "--db", database, "--port", str(port)]
    refused = run(*serve)
    assert refused.returncode == 2
    assert "rankscope token create" in refused.stderr
    made = run(*RANKSCOPE, "token", "create", "admin", "--scope", "admin", "--db", database)
    assert made.returncode == 0, made.stderr

    _python, *check = [word.replace(":8642", f":{port}") for word in command("CMD")]
    with Process(serve, log=tmp_path / "server.log") as server:
        until = time.monotonic() + 120
        while run(sys.executable, *check).returncode != 0:
            assert server.exit_code is None, server.tail()
            assert time.monotonic() < until, server.tail()
            time.sleep(0.2)
    assert run(sys.executable, *check).returncode != 0
