"""What a page takes that stays open on a living run: bytes and memory, measured by Chromium."""

import threading
import time

import pytest

from tests.support.runs.fixture_run import SyntheticRun, post
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watched_page
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

# 16 ranks at 4 steps a second, of which each posts every two seconds.
RANKS, PACE, PART = 16, 4.0, 8
# Steps that are there when the page opens: more than a chart has points, and few enough for what is
# new to be seen at once, so that charts are drawn anew as often as ever.
BEGIN = 640
WINDOW_S = 16.0
# What ten minutes may take, and by what the heap may be larger after them.
MOST_BYTES = 10e6
MOST_GROWTH = 1.2
RUN = SyntheticRun(run="live", ranks=RANKS, steps=4000, state="running", told=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        post(service.url, RUN, 0, BEGIN, size=80)
        yield service.url


class Wire:
    """Bytes that came over the network, headers included, as the browser counts them."""

    def __init__(self, page) -> None:
        self.session = page.context.new_cdp_session(page)
        self.session.send("Network.enable")
        self.bytes = 0
        self.addresses: dict[str, str] = {}
        self.of: dict[str, int] = {}
        self.session.on("Network.requestWillBeSent", self._asked)
        self.session.on("Network.loadingFinished", self._came)

    def _asked(self, event) -> None:
        self.addresses[event["requestId"]] = event["request"]["url"].partition("?")[0]

    def _came(self, event) -> None:
        self.bytes += event["encodedDataLength"]
        address = self.addresses.get(event["requestId"], "")
        self.of[address] = self.of.get(address, 0) + event["encodedDataLength"]

    def heap(self) -> float:
        """Bytes of the page's heap, when everything that nobody holds is gone."""
        self.session.send("HeapProfiler.enable")
        for _ in range(2):
            self.session.send("HeapProfiler.collectGarbage")
        return self.session.send("Runtime.getHeapUsage")["usedSize"]


def feed(server: str, begin: int, seconds: float, end: threading.Event) -> None:
    """Posts at the pace of the training, or as fast as a busy machine takes it."""
    began = time.monotonic()
    step = begin
    while not end.is_set() and time.monotonic() - began < seconds:
        post(server, RUN, step, step + PART, size=PART)
        step += PART
        end.wait(max(0.0, began + (step - begin) / PACE - time.monotonic()))
    end.set()


def test_ten_minutes_of_a_living_run_take_few_bytes(browser, server):
    with watched_page(browser, server, height=1400) as watched:
        page = watched.page
        wire = Wire(page)
        page.goto("/runs/live")
        page.wait_for_selector('.chart[data-metric="loss"][data-drawn]')
        page.wait_for_timeout(5000)
        opened = wire.bytes
        wire.of.clear()
        end = threading.Event()
        began = time.monotonic()
        feeder = threading.Thread(target=feed, args=(server, BEGIN, WINDOW_S, end))
        feeder.start()
        while not end.is_set():
            page.wait_for_timeout(500)
        feeder.join()
        took = time.monotonic() - began
        live = wire.bytes - opened
        whole = opened + live * 600 / took
        print(f"opened {opened:,}, live {live:,} in {took:.0f} s: {whole:,.0f} in ten minutes")
        assert live > 0
        assert whole < MOST_BYTES, wire.of
        watched.assert_clean()


def test_the_heap_of_a_page_is_bounded_by_what_its_charts_show(browser, server):
    """More than ten minutes' steps, which are 2,400, come as fast as the page draws."""
    run = SyntheticRun(run="long", ranks=4, steps=8000, state="running", told=True)
    # Buckets are twice as wide from here on, and from the double: charts have half of their points
    # at the beginning and again at the end, and the more there are, the larger is the heap.
    begin, rounds, part = 2400, 10, 300
    post(server, run, 0, begin, size=400)
    with watched_page(browser, server, height=1400) as watched:
        page = watched.page
        wire = Wire(page)
        shown = """step => {
          const { data } = document.querySelector('.chart[data-metric="loss"] .plot');
          return (data ?? []).some(({ x }) => Array.from(x?._inputArray ?? x ?? []).some((v) => v >= step));
        }"""  # noqa: E501  one expression for the browser
        page.goto("/runs/long")
        page.wait_for_selector('.chart[data-metric="loss"][data-drawn]')
        heaps = []
        for number in range(rounds):
            step = begin + number * part
            post(server, run, step, step + part, size=part)
            # A bucket may be eight steps wide, and the last one is filling.
            page.wait_for_function(shown, arg=step + part - 17)
            heaps.append(wire.heap())
        print("MB of heap:", [round(heap / 1e6, 1) for heap in heaps])
        # The least of some: what plotly has put aside for later does not count.
        first, last = min(heaps[:4]), min(heaps[-5:])
        assert last < MOST_GROWTH * first, heaps
        points = page.evaluate(
            """() => Math.max(...[...document.querySelectorAll('.chart .plot')]
              .flatMap((plot) => (plot.data ?? []).filter((t) => t.meta?.role === 'raw'))
              .map(({ x }) => (x._inputArray ?? x).length))"""
        )
        assert points <= 600
        watched.assert_clean()
