"""Whoever follows a page, command by command, gets what it says."""

from pathlib import Path

import pytest

from tests.support import doc_blocks
from tests.support.servers.service import Service

DOCS = Path(__file__).parent.parent / "docs"
TUTORIAL = "tutorial.md"
# Pages whose blocks are run, in their order.
FOLLOWED = (
    TUTORIAL,
    "multi-node.md",
    "from/tensorboard.md",
    "python-client.md",
    "ingest.md",
    "acting.md",
)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.e2e
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_page_does_what_it_says(name, service, tmp_path):
    page = (DOCS / name).read_text(encoding="utf-8")
    if name != TUTORIAL:
        # Other pages speak of a training that there is: that of the tutorial.
        tutorial = doc_blocks.blocks((DOCS / TUTORIAL).read_text(encoding="utf-8"))
        (script,) = [block for block in tutorial if block.title == "train.py"]
        (tmp_path / script.title).write_text(script.text, encoding="utf-8")
    assert doc_blocks.run(page, folder=tmp_path, server=service.url) > 0


def test_a_page_that_is_wrong_is_noticed(tmp_path):
    for block in ("```sh\nfalse\n```\n", "```sh\necho one\n```\n```text\ntwo\n```\n"):
        with pytest.raises(AssertionError):
            doc_blocks.run(block, folder=tmp_path, server="http://127.0.0.1:1")
