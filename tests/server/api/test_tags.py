"""Tags of runs: named by the job, changed by people, found by lists."""

import pytest

from rankscope.agent import wire
from rankscope.server.commands.lists import runs
from rankscope.server.commands.tag import tag
from tests.support.servers.api import batch, check_problem, column, get, post


def start(client, run, tags=None, *, seq=0, session="s0", rank=0):
    config = {} if tags is None else {"tags": tags}
    sent = batch(
        rank,
        run=run,
        seq=seq,
        hello=wire.Hello(started_at=1000.0, config={"model": "small", **config}),
        columns={"loss": column([seq], [1.0])},
    )
    sent = wire.decode(wire.encode(sent))
    assert post(client, sent).status_code == 200


def tags_of(client, run):
    return get(client, f"/runs/{run}")["tags"]


def change(client, run, **changes):
    return client.patch(f"/api/v1/runs/{run}/tags", json=changes)


def found(client, **asked):
    return {run["id"] for run in get(client, "/runs", **asked)["items"]}


def test_the_job_names_them_and_lists_find_them(client):
    start(client, "ant", ["nightly", "large"])
    start(client, "bee", ["nightly"])
    start(client, "cat")
    assert tags_of(client, "ant") == ["large", "nightly"]
    assert tags_of(client, "cat") == []
    assert found(client, tag="nightly") == {"ant", "bee"}
    assert found(client, tag=["nightly", "large"]) == {"ant"}
    # The whole word, and no pattern.
    assert found(client, tag="night") == found(client, tag="n%y") == set()


def test_people_change_them_and_a_job_that_comes_back_does_not(client):
    start(client, "ant", ["nightly"])
    answer = change(client, "ant", add=["kept", "good run"], remove=["nightly", "never"])
    assert answer.json() == {"tags": ["good run", "kept"]}
    start(client, "ant", ["nightly", "second"], seq=1)
    assert tags_of(client, "ant") == ["good run", "kept"]
    assert change(client, "ant", remove=["good run", "kept"]).json() == {"tags": []}
    start(client, "ant", ["nightly"], seq=2)
    assert tags_of(client, "ant") == []
    assert found(client, tag="nightly") == set()


def test_the_lowest_rank_speaks_for_the_run_whoever_comes_first(client):
    start(client, "ant", ["of-one"], rank=1)
    assert tags_of(client, "ant") == ["of-one"]
    start(client, "ant", ["of-all"], rank=0)
    assert tags_of(client, "ant") == ["of-one"]


@pytest.mark.parametrize("facts", ["nightly", {"a": 1}, [["x"]], ["", " x", "a,b", "x" * 65]])
def test_facts_of_that_name_that_are_no_tags_are_facts_alone(client, facts):
    start(client, "ant", facts)
    about = get(client, "/runs/ant")
    assert (about["tags"], about["config"]["tags"]) == ([], facts)


@pytest.mark.parametrize(
    "changes",
    [
        {"add": ["a,b"]},
        {"add": [""]},
        {"add": ["x" * 65]},
        {"add": ["line\nbreak"]},
        {"add": [f"t{n}" for n in range(33)]},
        {"add": ["a"], "remove": ["a"]},
        {"set": ["a"]},
    ],
)
def test_what_is_no_tag_is_refused_and_nothing_is_changed(client, changes):
    start(client, "ant", ["nightly"])
    check_problem(change(client, "ant", **changes), 422)
    assert tags_of(client, "ant") == ["nightly"]
    assert get(client, "/audit")["items"] == []


def test_an_unknown_run_has_none(client):
    check_problem(change(client, "none", add=["a"]), 404)


def test_who_changed_them_is_logged(client):
    start(client, "ant")
    change(client, "ant", add=["b", "a"])
    [entry] = get(client, "/audit")["items"]
    assert (entry["act"], entry["subject"]) == ("run.tags", "ant")
    assert entry["details"] == {"add": ["a", "b"], "remove": []}


def test_the_commands(client, capsys):
    start(client, "ant", ["nightly"])
    start(client, "bee")
    server = ["--server", str(client.base_url)]
    assert tag(["ant", "kept", "--remove", "nightly", *server]) == 0
    assert capsys.readouterr().out == "kept\n"
    assert tag(["bee", *server]) == 0
    assert capsys.readouterr().out == "bee has no tags\n"
    assert runs(["--tag", "kept", *server]) == 0
    listed = capsys.readouterr().out
    assert "ant" in listed
    assert "bee" not in listed
    assert listed.splitlines()[1].endswith("kept")
    assert tag(["ant", "a,b", *server]) == 1
    assert "no comma" in capsys.readouterr().err
