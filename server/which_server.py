"""Which server a command asks, and as whom: the arguments that say so."""

from __future__ import annotations

import argparse
import os
from urllib.parse import urlsplit

DEFAULT_SERVER = "http://127.0.0.1:8642"


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which server is asked, and as whom."""
    parser.add_argument(
        "--server",
        type=_address,
        default=os.environ.get("RANKSCOPE_SERVER") or DEFAULT_SERVER,
        help=f"URL of the server; default: RANKSCOPE_SERVER, or {DEFAULT_SERVER}",
    )
    parser.add_argument(
        "--token",
        type=_token,
        default=os.environ.get("RANKSCOPE_TOKEN") or None,
        help="bearer token; default: RANKSCOPE_TOKEN",
    )


def _address(text: str) -> str:
    """The URL of a server, without a slash at its end."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no URL of a server; write it like {DEFAULT_SERVER}"
        )
    return text.rstrip("/")


def _token(text: str) -> str:
    """A token as a header can carry it; as the agent takes it."""
    token = text.strip()
    if not token.isascii() or any(c <= " " or c == "\x7f" for c in token):
        # Which it is stays unsaid: it is a secret.
        raise argparse.ArgumentTypeError(
            "a token is ASCII text without spaces; copy it again as it was made"
        )
    return token
