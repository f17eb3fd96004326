"""The site of the documentation: built strictly, all links lead somewhere, nothing from outside."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

from rankscope.server.detectors import registry

REPOSITORY = Path(__file__).parent.parent
SITE = "http://site/"


class Page(HTMLParser):
    """What a built page refers to, loads and defines."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.anchors, self.scripts = [], [], {""}, []
        self._script = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given["href"])
        if tag == "script" and "src" not in given and "json" not in given.get("type", ""):
            self._script = ""

    def handle_data(self, data):
        if self._script is not None:
            self._script += data

    def handle_endtag(self, tag):
        if tag == "script" and self._script is not None:
            self.scripts.append(self._script)
            self._script = None


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the site, as `make docs` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """Address -> page."""
    found = {}
    for path in site.rglob("*.html"):
        address = path.relative_to(site).as_posix().removesuffix("index.html")
        found[SITE + address] = Page(path.read_text(encoding="utf-8"))
    return found


def test_every_kind_has_its_page(pages):
    for kind in registry.KINDS:
        assert f"{SITE}kinds/{kind}/" in pages


def test_every_kind_belongs_to_a_symptom(pages):
    linked = {urljoin(f"{SITE}symptoms/", link) for link in pages[f"{SITE}symptoms/"].links}
    for kind in registry.KINDS:
        assert f"{SITE}kinds/{kind}/" in linked, kind


def test_links_lead_to_pages_and_their_headings(site, pages):
    for address, page in pages.items():
        if address.endswith("404.html"):
            continue  # it is shown in the place of any page
        for link in page.links:
            target, anchor = urldefrag(urljoin(address, link))
            if not target.startswith(SITE):
                continue
            if target in pages:
                assert unquote(anchor) in pages[target].anchors, f"{address}: {link}"
            else:
                file = site / unquote(urlsplit(target).path).lstrip("/")
                assert file.is_file(), f"{address}: {link}"


def test_pages_load_nothing_from_elsewhere(site, pages):
    for address, page in pages.items():
        if address.endswith("404.html"):
            continue
        for loaded in page.loaded:
            target = urljoin(address, loaded)
            assert target.startswith((SITE, "data:")), f"{address}: {loaded}"
            if target.startswith(SITE):
                assert (site / urlsplit(target).path.lstrip("/")).is_file(), f"{address}: {loaded}"


def test_pages_have_no_script_that_the_server_forbids(pages):
    for address, page in pages.items():
        assert page.scripts == [], address
