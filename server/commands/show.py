"""`rankscope show RUN`: a run in the terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rankscope.server.commands import client
from rankscope.server.commands.run_facts import load
from rankscope.server.commands.terminal import console, view


@client.command
def show(argv: Sequence[str]) -> int:
    """Prints headline, ranks, alerts and the course of the loss."""
    parser = client.parser(
        "show", "Shows a run: whether it is fine, its ranks, its alerts, the course of its loss."
    )
    parser.add_argument("run", metavar="RUN", type=client.run_id, help="id of the run")
    options = parser.parse_args(argv)
    screen = console()
    facts = load(client.server_of(options), options.run)
    if options.json:
        print(json.dumps(dataclasses.asdict(facts), indent=2))
    else:
        plain = not screen.encoding.startswith("utf")
        screen.print(view(facts, width=screen.width, plain=plain))
    return client.OK
