"""`rankscope baseline RUN`: which runs others of their project are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.server.commands import client


@client.command
def baseline(argv: Sequence[str]) -> int:
    """Marks runs as baselines, or takes them away."""
    parser = client.parser(
        "baseline",
        "Makes runs baselines of their project, with which `rankscope gate RUN --against "
        "project:NAME` compares. The server takes the newest that passed by itself; what is marked "
        "or taken away here stays so. `rankscope runs --baseline` lists them.",
        prints_json=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=client.run_id, help="id of a run")
    parser.add_argument(
        "--remove", action="store_true", help="compare with them no more, though they may pass"
    )
    options = parser.parse_args(argv)
    server = client.server_of(options)
    for run in options.runs:
        method = "DELETE" if options.remove else "PUT"
        server.change(method, f"{client.run_path(run)}/baseline")
        print(f"{run} is {'no baseline' if options.remove else 'a baseline'} of its project now")
    return client.OK
