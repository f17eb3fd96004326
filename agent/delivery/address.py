"""Where batches are posted to: the address, what goes with each request, and the proxy between."""

from __future__ import annotations

import ipaddress
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from rankscope import agent
from rankscope.agent import wire

INGEST_PATH = "/api/v1/ingest"


class Address(NamedTuple):
    """What an HTTP client has to know.

    Attributes:
        url: of the route that takes batches.
        headers: of each request.
        proxy: URL of the proxy to go through; None where there is none.
    """

    url: str
    headers: Mapping[str, str]
    proxy: str | None


def address_of(server: str, token: str | None) -> Address:
    """The address of a server.

    Args:
        server: its URL, with the path it may have behind a reverse proxy.
        token: bearer token.
    """
    headers = {
        "Content-Type": wire.CONTENT_TYPE,
        "User-Agent": f"rankscope-agent/{agent.__version__}",
    }
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return Address(f"{server}{INGEST_PATH}", headers, _proxy(server))


def _proxy(server: str) -> str | None:
    """The proxy that the environment names for a server."""
    parts = urlsplit(server)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or _is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return proxy


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
