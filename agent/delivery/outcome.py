"""What a reply of the server means for the batch that was posted, as a value.

Pure: nothing here posts or waits. The clock is read for a Retry-After that is a date, alone.
"""

from __future__ import annotations

import datetime
import email.utils
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rankscope.agent import wire
from rankscope.agent.delivery.http import NoReply, Reply, readable

# What a person has to put right first: the token, the address. Nothing is wrong with the batch, so
# it is kept.
_MISDIRECTED = frozenset({401, 403, 404, 405, 407, 421})
# Of them, what the server says of who asks: a token that is missing, unknown or not for this.
_OF_THE_TOKEN = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
# Of the other 4xx only these say "later"; the rest are final, if they are the server's own.
_LATER = frozenset({408, 425, 429})
_ROUTE = "/api/v1/ingest"
_LONGEST_RETRY_AFTER = 600.0
# How the decoder of every version refuses those after it.
_OF_THE_VERSION = "v: version "


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server has the batch, now or since an earlier attempt."""

    answer: wire.Answer


@dataclass(frozen=True, slots=True)
class Away:
    """Nothing is wrong with the batch: try again later.

    Attributes:
        why: goes on after "the server ...:".
        retry_after: seconds that the server asks for, if it does.
        misdirected: a person has to do something first, so that hurry is of no use.
        this_batch: batches of other runs may be taken nevertheless.
        busy: the server is there, and has too much to do at the moment.
        of_the_token: the server is there, and does not let in whoever asks.
    """

    why: str
    retry_after: float | None = None
    misdirected: bool = False
    this_batch: bool = False
    busy: bool = False
    of_the_token: bool = False


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The batch has to be split."""

    why: str = "a batch is too large"


@dataclass(frozen=True, slots=True)
class Refused:
    """Our server will never take this batch; `why` is its own explanation."""

    why: str

    @property
    def of_the_version(self) -> bool:
        """Whether the server is older than the format of the batch."""
        return _OF_THE_VERSION in self.why


Outcome = Accepted | Away | TooLarge | Refused


def outcome_of(reply: Reply | NoReply) -> Outcome:
    """What a reply, or that there was none, means for the batch that was posted."""
    if isinstance(reply, NoReply):
        return Away(reply.why)
    status, text = reply.status, reply.body
    if 200 <= status < 300:
        answer = _answer(text)
        if answer is None:
            return Away("something answers there, but no Rankscope server", misdirected=True)
        return Accepted(answer)
    if status == 413:
        return TooLarge()
    why = f"it answers {status}, {_problem(text)}"
    if status in _MISDIRECTED or 300 <= status < 400:
        # A token may be for the project of another batch.
        return Away(
            why,
            misdirected=True,
            this_batch=status == HTTPStatus.FORBIDDEN,
            # Of a proxy's it is not known whom it would let in.
            of_the_token=status in _OF_THE_TOKEN and _of_our_server(status, text),
        )
    if 400 <= status < 500 and status not in _LATER:
        if _of_our_server(status, text):
            return Refused(why)
        # A proxy in between knows nothing of the batch: nothing is lost for what it says.
        return Away(why, misdirected=True, this_batch=True)
    busy = status == HTTPStatus.TOO_MANY_REQUESTS
    return Away(why, retry_after=_retry_after(reply.retry_after), busy=busy)


def _answer(text: bytes) -> wire.Answer | None:
    """The answer of our server; None where it is somebody else's."""
    plain = _object(text)
    accepted, dense_until = plain.get("accepted"), plain.get("dense_until")
    if not isinstance(accepted, int):
        return None
    return wire.Answer(
        accepted=accepted,
        duplicate=plain.get("duplicate") is True,
        dense_until=dense_until if isinstance(dense_until, int) else None,
        hello_wanted=plain.get("hello_wanted") is True,
    )


def _of_our_server(status: int, text: bytes) -> bool:
    """Whether a refusal has the shape of our server's, which names its status and the route."""
    plain = _object(text)
    return plain.get("status") == status and str(plain.get("instance")).endswith(_ROUTE)


def _problem(text: bytes) -> str:
    """What a problem+json body (RFC 9457) says; otherwise the beginning of the text."""
    plain = _object(text)
    said = plain.get("detail") or plain.get("title")
    if isinstance(said, str):
        return readable(said)
    return readable(text.decode("utf-8", "replace")) or "without a reason"


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number of seconds, or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            at = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        if at.tzinfo is None:
            at = at.replace(tzinfo=datetime.UTC)
        seconds = (at - datetime.datetime.now(datetime.UTC)).total_seconds()
    return min(max(0.0, seconds), _LONGEST_RETRY_AFTER) if seconds == seconds else None
