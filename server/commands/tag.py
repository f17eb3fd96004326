"""`rankscope tag RUN TAG...`: words by which runs are found again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankscope.server.commands import client


@client.command
def tag(argv: Sequence[str]) -> int:
    """Gives a run tags and takes others off it; without any, says which it has."""
    parser = client.parser(
        "tag",
        "Give a run tags, words by which it is found again (`rankscope runs --tag TAG`), or take "
        "some off it; without any it says which the run has.",
    )
    parser.add_argument("run", metavar="RUN", type=client.run_id, help="id of the run")
    parser.add_argument("tags", metavar="TAG", nargs="*", help="a tag that it gets")
    parser.add_argument(
        "--remove", metavar="TAG", action="append", default=[], help="a tag that is taken off it"
    )
    options = parser.parse_args(argv)
    server = client.server_of(options)
    path = client.run_path(options.run)
    if options.tags or options.remove:
        changes = {"add": options.tags, "remove": options.remove}
        found = server.change("PATCH", f"{path}/tags", changes)
    else:
        found = {"tags": server.get(path)["tags"]}

    def lines(answer: dict[str, Any]) -> list[str]:
        return answer["tags"] or [f"{options.run} has no tags"]

    client.show(found, options, lines)
    return client.OK
