"""`/login` and `/logout`: a browser's token, kept in a cookie that scripts cannot read."""

from __future__ import annotations

import time
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from rankscope.server.api.guard import COOKIE, Guard
from rankscope.server.api.problems import Problem

router = APIRouter(include_in_schema=False)

# Of a form with a token and an address.
_MAX_FORM_BYTES = 16_384
_LONGEST_SECONDS = 30 * 86_400


@router.post("/login")
async def login(request: Request) -> Response:
    """Takes the form of the page; back to where the browser was sent away from."""
    form = await _form(request)
    secret, there = form.get("token", "").strip(), form.get("next", "/")
    if not there.startswith("/") or there.startswith(("//", "/\\")):
        there = "/"  # nobody is to be sent to another site by a link to this one
    root = request.scope.get("root_path", "").rstrip("/")
    guard: Guard = request.app.state.guard
    token = await guard.token_of(secret)
    if token is None:
        return RedirectResponse(f"{root}/login?wrong=1&next={quote(there, safe='')}", 303)
    left = _LONGEST_SECONDS if token.expires_at is None else token.expires_at - time.time()
    answer = RedirectResponse(f"{root}{there}", 303)
    answer.set_cookie(
        COOKIE,
        secret,
        max_age=int(min(left, _LONGEST_SECONDS)),
        path=f"{root}/",
        httponly=True,
        secure=request.url.scheme == "https",
        # A link in a chat leads to the run at once; what changes something is guarded apart.
        samesite="lax",
    )
    return answer


@router.post("/logout")
def logout(request: Request) -> Response:
    """Forgets the browser's token."""
    root = request.scope.get("root_path", "").rstrip("/")
    answer = RedirectResponse(f"{root}/login", 303)
    answer.delete_cookie(COOKIE, path=f"{root}/", httponly=True, samesite="lax")
    return answer


async def _form(request: Request) -> dict[str, str]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_FORM_BYTES:
            raise Problem(413, f"the form is larger than {_MAX_FORM_BYTES} bytes")
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}
