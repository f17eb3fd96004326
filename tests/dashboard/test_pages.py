"""The pages and figures over HTTP, on arrays in memory; the browser tests use the whole server."""

import base64
import gzip
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from anyio import to_thread
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from rankscope.dashboard import pages
from rankscope.dashboard.figures import DARK, LIGHT, Curve, Mark
from rankscope.dashboard.source import AlertFacts, DataRead, Distances, Divergence, LayerValues
from tests.support.servers.serve_app import serve_app

FOLDER = Path(pages.__file__).parent
RUN = "brave-otter"


class Arrays:
    """A source whose one run has four ranks and thirty steps.

    Attributes:
        frozen: what differs are tensors that are not trained, and so no link but the first.
        stage: of its alerts.
    """

    frozen = False
    stage = ""

    def ranks(self, run):
        return [0, 1, 2, 3] if run == RUN else None

    def similar(self, run):
        return [RUN] if run.startswith(RUN) else []

    def curves(self, run, metric, wanted):
        self.wanted = wanted
        steps = np.arange(30)
        return [
            Curve(r, steps, np.where(steps == 7, np.nan, steps + 10.0 * r))
            for r in range(4)
            if wanted.ranks is None or r in wanted.ranks
        ]

    def divergence(self, run, *, stage, from_step, to_step):
        relative = np.zeros((4, 30))
        relative[2, 20:] = 1e-3
        if stage in ("start", "outside_optimizer"):
            relative[2, 21:] = 0
        if stage == "parameters" and self.frozen:
            relative[:] = 0
        stages = ("start", "parameters")
        return Divergence(
            stage=stage or "parameters",
            stages=stages,
            ranks=(0, 1, 2, 3),
            steps=np.arange(30),
            until=np.arange(30),
            counts=np.ones(30, np.int64),
            relative=relative,
            checked=np.ones((4, 30), np.bool_),
        )

    def distances(self, run, *, stage, step):
        if stage == "batch":
            return None
        place = np.array([0.0, 0.0, 1.0, 0.0])
        distance = np.abs(place[:, None] - place[None])
        return Distances(stage or "parameters", step or 29, (0, 1, 2, 3), distance, distance == 0)

    def layers(self, run, metric, table, wanted):
        if table != "parameters":
            return None
        values = np.tile([[1.0], [1e-9]], (1, 3))
        values[1, 2] = 0.0
        return LayerValues(0, ("head.weight", "<b>stem.weight"), np.array([0, 10, 20]), values)

    def data(self, run, *, from_step, to_step):
        if to_step == 0:
            return None
        counts = np.array([[9, 0, 0, 3]] * 4)
        shared = np.full((4, 4), 0.25)
        np.fill_diagonal(shared, np.nan)
        return DataRead((0, 1, 2, 3), np.arange(4), counts, counts, shared, (0,), True, False)

    def scaling(self, run):
        return []

    def metrics(self, run):
        return ["loss", "wait_seconds"]

    def alert(self, run, alert):
        kinds = {"a1": "desync.parameters", "a2": "rank.straggler", "a3": "lr.too_high"}
        kinds |= {"a4": "update.missing", "a5": "gradient.vanishing"}
        if alert not in kinds:
            return None
        named = ("<b>stem.weight", ("grad_norm", "update_ratio")) if alert in ("a4", "a5") else ()
        return AlertFacts(kinds[alert], self.stage, (2,), 20, 29, {}, *named)

    def marks(self, run):
        return [Mark("a1", "critical", "rank 2 left", 20, 29)]

    def suspects(self, run):
        return [2]


@pytest.fixture(scope="module")
def source() -> Arrays:
    return Arrays()


@pytest.fixture(scope="module")
def client(source):
    app = FastAPI()
    pages.install(app, source)
    with serve_app(app) as client:
        yield client


def array(spec) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(spec["bdata"]), np.dtype(spec["dtype"]))
    return (
        flat.reshape([int(size) for size in spec["shape"].split(",")]) if "shape" in spec else flat
    )


@pytest.mark.parametrize("path", ["/", "/alerts", "/fleet", "/notifications", f"/runs/{RUN}"])
def test_pages_come_with_a_policy_that_lets_nothing_in(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "script-src" not in policy
    assert "unsafe-eval" not in policy
    assert not re.search(r"<script(?![^>]*src=)", answer.text)
    assert not re.search(r"\son\w+=", answer.text)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", answer.text)


def test_every_file_that_a_page_names_is_there(client):
    for path in ("/", "/alerts", "/fleet", "/notifications", f"/runs/{RUN}", "/runs/none"):
        text = client.get(path, headers={"accept": "text/html"}).text
        files = re.findall(r"(?:src|href)=\"(/static/[^\"]+)\"", text)
        assert files
        for file in files:
            assert client.get(file).status_code == 200, file


def test_modules_import_what_is_there():
    for script in (FOLDER / "static").glob("*.js"):
        for name in re.findall(r"from \"\./([^\"]+)\"", script.read_text()):
            assert (FOLDER / "static" / name).is_file(), (script.name, name)


def test_the_run_page_is_inert_to_a_hostile_name():
    class AnyRun(Arrays):
        def ranks(self, run):
            return [0]

    app = FastAPI()
    pages.install(app, AnyRun())
    with serve_app(app) as client:
        answer = client.get("/runs/%22%3E%3Cscript%3Ealert(1)%3C%2Fscript%3E".replace("%2F", ""))
    assert answer.status_code == 200
    assert "<script>alert" not in answer.text
    assert "&lt;script&gt;" in answer.text


def test_help_that_was_not_built_says_how_to_build_it(source, tmp_path):
    app = FastAPI()
    pages.install(app, source, site=tmp_path / "help")
    with serve_app(app) as client:
        answer = client.get("/help/", headers={"accept": "text/html"})
        assert answer.status_code == 200
        assert "<code>make docs</code>" in answer.text
        assert "docs/tutorial.md" in answer.text
        # Its link goes on leading here, by whichever way it is written.
        assert client.get("/help", follow_redirects=True).text == answer.text
        assert client.get("/help/kinds/loss.spike/").status_code == 404


def test_an_unknown_run_is_explained_to_a_browser(client):
    answer = client.get("/runs/none", headers={"accept": "text/html,*/*"})
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")
    assert "RANKSCOPE_SERVER" in answer.text
    assert "default-src 'self'" in answer.headers["content-security-policy"]


def test_a_mistyped_run_is_suggested(client):
    answer = client.get(f"/runs/{RUN}x", headers={"accept": "text/html"})
    assert answer.status_code == 404
    assert f"Did you mean &#39;{RUN}&#39;?" in answer.text
    answer = client.get("/runs/zzzzzzzzzzzz", headers={"accept": "text/html"})
    assert "Did you mean" not in answer.text


def test_an_unknown_address_is_a_page_for_browsers_only(client):
    page = client.get("/nowhere", headers={"accept": "text/html"})
    assert page.status_code == 404
    assert "Nothing is at /nowhere" in page.text
    for path, accept in (("/nowhere", "application/json"), ("/api/v1/nowhere", "text/html")):
        answer = client.get(path, headers={"accept": accept})
        assert answer.status_code == 404
        assert answer.headers["content-type"].startswith("application/")


def test_a_fault_of_the_server_is_a_page_for_browsers_and_still_a_fault():
    class Broken(Arrays):
        def ranks(self, run):
            raise RuntimeError("planted")

    app = FastAPI()
    seen = []

    @app.exception_handler(Exception)
    async def log(request, error):
        seen.append(error)
        return JSONResponse({"detail": "failed"}, 500)

    pages.install(app, Broken())
    # After a fault the server drops the connection.
    last = {"connection": "close"}
    with serve_app(app) as client:
        page = client.get(f"/runs/{RUN}", headers={"accept": "text/html", **last})
        plain = client.get(f"/runs/{RUN}", headers={"accept": "application/json", **last})
    assert page.status_code == plain.status_code == 500
    assert "The server failed at this page" in page.text
    assert "planted" not in page.text
    assert plain.json() == {"detail": "failed"}
    assert [str(e) for e in seen] == ["planted", "planted"]


def test_plotly_comes_out_of_its_package_and_may_be_kept_for_ever(client):
    (file,) = re.findall(r'data-plotly="([^"]+)"', client.get(f"/runs/{RUN}").text)
    name = f"/static/{file}"
    answer = client.get(name, headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert "immutable" in answer.headers["cache-control"]
    assert "Plotly" in answer.text
    assert client.get("/static/plotly-0.0.1.min.js").status_code == 404


def test_our_own_files_are_asked_for_again(client):
    first = client.get("/static/rankscope.css")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/static/rankscope.css", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize("name", ["rankscope.css", "run.js", "icon.svg"])
def test_our_own_files_travel_compressed(client, name):
    asked = {"accept-encoding": "gzip"}
    with client.stream("GET", f"/static/{name}", headers=asked) as answer:
        sent = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) == len(sent)
    plain = client.get(f"/static/{name}", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert gzip.decompress(sent) == plain.content == (FOLDER / "static" / name).read_bytes()
    for one in (answer, plain):
        assert one.headers["vary"] == "Accept-Encoding"
        assert one.headers["content-type"] == plain.headers["content-type"]
        known = asked | {"if-none-match": one.headers["etag"]}
        assert client.get(f"/static/{name}", headers=known).status_code == 304


def test_files_do_not_wait_for_queries_that_are_being_answered(source):
    begun, over = threading.Event(), threading.Event()
    app = FastAPI()

    @app.get("/one-thread")
    async def one_thread():
        to_thread.current_default_thread_limiter().total_tokens = 1

    @app.get("/query")
    def query():
        begun.set()
        over.wait(60)

    pages.install(app, source)
    with serve_app(app) as client:
        (plotly,) = re.findall(r'data-plotly="([^"]+)"', client.get(f"/runs/{RUN}").text)
        client.get("/one-thread")
        asking = threading.Thread(target=client.get, args=("/query",))
        asking.start()
        try:
            assert begun.wait(60)
            for name in ("run.js", "rankscope.css", plotly):
                assert client.get(f"/static/{name}", timeout=30).status_code == 200
        finally:
            over.set()
            asking.join()


def test_the_run_page_names_all_its_scripts_at_once(client):
    text = client.get(f"/runs/{RUN}").text
    named = re.findall(r'<link rel="modulepreload" href="/static/([^"]+)">', text)
    assert named[0] == "run.js"
    assert len(named) == len(set(named))
    imported = {
        name
        for script in named
        for name in re.findall(r' from "\./([^"]+)"', (FOLDER / "static" / script).read_text())
    }
    assert imported == {*named} - {"run.js"}


def test_curves_carry_the_numbers_with_their_nan(client):
    figure = client.get(f"/runs/{RUN}/figures/curves.json?metric=loss").json()
    lines = {t["name"]: t for t in figure["data"] if t["name"].startswith("rank")}
    values = array(lines["rank 3"]["y"])
    assert np.isnan(values[7])
    assert np.array_equal(np.delete(values, 7), np.delete(np.arange(30) + 30.0, 7))
    assert "NaN at step 7, ranks 0-3" in figure["layout"]["meta"]["summary"]


def test_controls_reach_the_figure(client, source):
    figure = client.get(
        f"/runs/{RUN}/figures/curves.json",
        params={
            "metric": "loss", "ranks": "0,2-3", "highlight": "3", "from_step": 5, "to_step": 25,
            "smoothing": 0.5, "log": "true", "theme": "dark", "max_points": 100,
        },
    ).json()  # fmt: skip
    assert (source.wanted.from_step, source.wanted.to_step) == (5, 25)
    assert source.wanted.max_points == 100
    names = [t["name"] for t in figure["data"] if t.get("meta", {}).get("role") == "smoothed"]
    assert names == ["rank 0", "rank 2", "rank 3"]
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert figure["layout"]["paper_bgcolor"] == DARK.panel
    low, high = figure["layout"]["xaxis"]["range"]
    assert low < 5 < 25 < high
    assert figure["layout"]["meta"]["named"] == [3]


def test_suspect_ranks_are_highlighted_without_being_asked(client):
    figure = client.get(f"/runs/{RUN}/figures/curves.json?metric=loss").json()
    assert figure["layout"]["meta"]["named"] == [2]


@pytest.mark.parametrize(
    "query",
    [
        "ranks=x",
        "ranks=5-2",
        "ranks=0-",
        "smoothing=1",
        "theme=pink",
        "max_points=1",
        "from_step=-1",
        "from_step=9&to_step=5",
        "to_step=99999999999999999999",
    ],
)
def test_what_cannot_be_shown_is_refused(client, query):
    answer = client.get(f"/runs/{RUN}/figures/curves.json?metric=loss&{query}")
    assert answer.status_code == 422


@pytest.mark.parametrize("name", ["curves.json?metric=loss", "divergence.json", "distances.json"])
def test_figures_of_an_unknown_run_are_404(client, name):
    assert client.get(f"/runs/none/figures/{name}").status_code == 404


def test_the_heatmap_offers_the_links_that_were_compared(client):
    figure = client.get(f"/runs/{RUN}/figures/divergence.json?stage=start&selected=20").json()
    meta = figure["layout"]["meta"]
    assert meta["stages"] == ["start", "parameters"]
    assert meta["stage"] == "start"
    assert meta["leavers"] == {"2": 20}


def test_the_matrix_is_that_of_the_step_asked_for(client):
    figure = client.get(f"/runs/{RUN}/figures/distances.json?step=21").json()
    assert figure["layout"]["meta"]["step"] == 21
    answer = client.get(f"/runs/{RUN}/figures/distances.json?stage=batch")
    assert answer.status_code == 404


def test_large_figures_travel_compressed(client):
    path = f"/runs/{RUN}/figures/divergence.json"
    plain = client.get(path, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    with client.stream("GET", path, headers={"accept-encoding": "gzip"}) as answer:
        raw = b"".join(answer.iter_raw())
        if answer.headers.get("content-encoding") == "gzip":
            assert json.loads(gzip.decompress(raw)) == plain.json()
        else:
            assert len(raw) < 16_384


@pytest.mark.parametrize(
    ("theme", "selector"), [(LIGHT, ":root"), (DARK, ':root[data-theme="dark"]')]
)
def test_style_sheet_and_figures_have_the_same_colours(theme, selector):
    css = (FOLDER / "static" / "rankscope.css").read_text()
    block = css.split(selector + " {", 1)[1].split("}", 1)[0]
    declared = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", block))
    for name, color in declared.items():
        if hasattr(theme, name):
            assert getattr(theme, name) == color, name
    assert {"page", "panel", "text", "muted", "critical", "equal", "unchecked"} <= set(declared)
    assert ", ".join(theme.differing) in block


def test_layers_have_one_scale_and_zero_has_a_colour_of_its_own(client):
    query = {"metric": "grad_norm"}
    figure = client.get(f"/runs/{RUN}/figures/layers.json", params=query).json()
    by_role = {trace["meta"]["role"]: trace for trace in figure["data"]}
    assert by_role["value"]["zmin"] == -9
    assert by_role["value"]["zmax"] == 0
    assert np.isfinite(array(by_role["zero"]["z"])).tolist() == [[False] * 3, [False, False, True]]
    assert figure["layout"]["meta"]["zero"] == ["<b>stem.weight"]
    # Plotly reads markup in ticks.
    assert figure["layout"]["yaxis"]["ticktext"] == ["head.weight", "&lt;b&gt;stem.weight"]


def test_layers_that_were_not_sampled_are_an_empty_figure_and_no_error(client):
    query = {"metric": "grad_norm", "table": "ema"}
    answer = client.get(f"/runs/{RUN}/figures/layers.json", params=query)
    assert answer.status_code == 200
    assert answer.json()["data"] == []
    assert "No tensor was sampled" in answer.json()["layout"]["annotations"][0]["text"]


@pytest.mark.parametrize(
    ("alert", "shows"),
    # The alert about the rate needs a series that this run has not, and falls back to the loss.
    [
        ("a1", "divergence"),
        ("a2", "wait_seconds"),
        ("a3", "loss"),
        ("a4", "update_ratio/<b>stem.weight"),
        ("a5", "grad_norm/<b>stem.weight"),
    ],
)
def test_an_alert_is_shown_on_what_it_is_about(client, alert, shows):
    figure = client.get(f"/runs/{RUN}/figures/alerts/{alert}.json").json()
    assert figure["layout"]["meta"]["shows"] == shows
    # Whose series it is stands over it, and is no markup.
    title = figure["layout"].get("title", {}).get("text", "")
    assert title == ("&lt;b&gt;stem.weight" if "/" in shows else "")


@pytest.mark.parametrize(
    ("stage", "frozen", "drawn"),
    [
        ("reduced_gradient", False, "reduced_gradient"),
        # Ranks that differ there do so for one step, and in their parameters from then on.
        ("outside_optimizer", False, "parameters"),
        ("start", False, "parameters"),
        ("outside_optimizer", True, "outside_optimizer"),
    ],
)
def test_an_alert_is_drawn_on_a_link_at_which_the_ranks_stay_different(
    client, source, monkeypatch, stage, frozen, drawn
):
    monkeypatch.setattr(source, "stage", stage)
    monkeypatch.setattr(source, "frozen", frozen)
    figure = client.get(f"/runs/{RUN}/figures/alerts/a1.json").json()
    assert figure["layout"]["meta"]["stage"] == drawn


def test_there_is_no_chart_of_an_alert_that_is_not_there(client):
    assert client.get(f"/runs/{RUN}/figures/alerts/b7.json").status_code == 404


def test_the_heatmap_of_a_metric_shows_values_or_ratios(client):
    address = f"/runs/{RUN}/figures/ranks.json"
    plain, ratio = (
        client.get(address, params={"metric": "loss", "relative": relative}).json()
        for relative in (False, True)
    )
    values, ratios = (array(f["data"][0]["customdata"]) for f in (plain, ratio))
    assert values[:, 1].tolist() == [1.0, 11.0, 21.0, 31.0]
    assert ratios[:, 1] == pytest.approx(values[:, 1] / 16.0)
    # Step 7 is NaN on all ranks: a colour of its own.
    (broken,) = [t for t in plain["data"] if t["meta"]["role"] == "nonfinite"]
    assert np.isfinite(array(broken["z"])).all(axis=0).nonzero()[0].tolist() == [7]


def test_what_the_ranks_read(client):
    folder = f"/runs/{RUN}/figures"
    figure = client.get(f"{folder}/data-ranks.json").json()
    assert figure["layout"]["meta"]["summary"].endswith("These are the newest steps, 0 to 3")
    assert [t["name"] for t in figure["data"]] == ["new", "had been another rank's"]
    steps = client.get(f"{folder}/data-steps.json", params={"from_step": 0, "to_step": 3}).json()
    assert steps["layout"]["xaxis"]["range"] == [0, 3]
    pairs = client.get(f"{folder}/overlap.json", params={"theme": "dark"}).json()
    assert pairs["layout"]["paper_bgcolor"] == DARK.panel
    missing = client.get(f"{folder}/overlap.json", params={"to_step": 0})
    assert missing.status_code == 404
