"""One POST to somebody else's service, and in a sentence what went wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import urllib3

_TIMEOUT_S = 10.0
_MOST_OF_ERROR = 300


class NotTaken(Exception):
    """A service did not take what it was sent; why, without the secrets of its address."""


def post(address: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """The answer to a request; takes some seconds at most.

    Args:
        address: without a name and password.

    Raises:
        NotTaken: there is no answer, or it is an error.
    """
    host = urlsplit(address).netloc
    try:
        with urllib3.PoolManager(retries=False, timeout=_TIMEOUT_S) as pool:
            answer = pool.request("POST", address, body=body, headers=headers, redirect=False)
    except urllib3.exceptions.HTTPError as error:
        raise NotTaken(f"{host} does not answer: {type(error).__name__}") from error
    if not 200 <= answer.status < 300:
        said = answer.data[:_MOST_OF_ERROR].decode("utf-8", "replace").strip()
        raise NotTaken(f"{host} answers {answer.status} {said}".strip())
    return answer.data
