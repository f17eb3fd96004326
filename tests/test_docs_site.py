"""The site of the documentation: built strictly, all links lead somewhere, nothing from outside."""

import functools
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

from rankscope.server.detectors import registry
from tests.support.servers.browser import HOW_TO_INSTALL, chromium, find_chromium

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


def test_every_example_is_linked_from_a_page_and_in_the_site(site):
    linked = {
        name
        for path in (REPOSITORY / "docs").rglob("*.md")
        for name in re.findall(r"/examples/(train_\w+)\.py\)", path.read_text(encoding="utf-8"))
    }
    examples = {path.stem for path in (REPOSITORY / "examples").glob("*.py")}
    assert linked == examples
    for name in examples:
        source = (REPOSITORY / "examples" / f"{name}.py").read_bytes()
        assert (site / "examples" / f"{name}.txt").read_bytes() == source


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


# Of all headings of a page: height as it is, and without the link behind the text.
HEIGHTS = """
() => {
  const links = [...document.querySelectorAll(".md-content .headerlink")];
  const heights = () => links.map((link) => link.parentElement.getBoundingClientRect().height);
  const shown = heights();
  links.forEach((link) => { link.style.display = "none"; });
  const bare = heights();
  links.forEach((link) => { link.style.display = ""; });
  return {shown, bare};
}
"""


@pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL)
@pytest.mark.parametrize("page", ["faq", "notifications", "python-api"])
def test_headings_have_no_empty_line_and_pages_no_scroll_bar_below(site, page):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *said):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with chromium() as browser:
            opened = browser.new_page()
            opened.goto(f"http://127.0.0.1:{server.server_port}/{page}/")
            # At one of so many widths some heading just fits.
            for width in (*range(320, 481, 10), *range(740, 1301, 40)):
                opened.set_viewport_size({"width": width, "height": 900})
                found = opened.evaluate(HEIGHTS)
                assert len(found["shown"]) > 3
                assert found["shown"] == found["bare"], width
                # The theme's field for searching moves into its place first.
                opened.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
    finally:
        server.shutdown()
        server.server_close()
