"""Files that the pages on deployment show are accepted by those that read them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import doc_blocks

DOCS = Path(__file__).parent.parent / "docs"


def shown(name):
    """The blocks of a page."""
    return doc_blocks.blocks((DOCS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["deployment.md", "multi-node.md"])
def test_commands_are_shell(name):
    scripts = [block.text for block in shown(name) if block.language == "sh"]
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True, timeout=60)


def test_systemd_accepts_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    (unit,) = (block for block in shown("deployment.md") if block.title == "rankscope.service")
    path = tmp_path / unit.title
    # The command has to be there.
    path.write_text(unit.text.replace("/opt/rankscope/bin/rankscope", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert str(path.name) not in done.stderr
