"""Who may ask: on this machine only pages of this machine, elsewhere only who has the token."""

import hashlib
import hmac
import ipaddress
import re
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\[\]:]+)(:\d*)?")
_SAFETY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine alone."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Stands before the app: checks the host name and the token, and adds the headers that keep a page in bounds.

    A page of another site can make a browser ask this machine under a name of its own (DNS rebinding); such a request
    carries that name as its host, and is refused. With a token, a request needs it in the address (`?token=`, answered
    with a cookie that then serves), in the cookie, or as `Authorization: Bearer`.

    Args:
        app: The app.
        token: What must be shown; None: nothing.
        local: Whether the server is for this machine alone.
        name: Tells the cookies of several viewers on one machine apart.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, local: bool, name: str = "") -> None:
        self._app = app
        self._token = token
        self._local = local
        self._cookie = f"its2clr-view{name}"
        # The cookie holds a digest: any text may be a token, and a cookie may not hold any text.
        self._session = hashlib.sha256(f"its2clr view {token}".encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        by_address = self._in_address(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for key, value in _SAFETY.items():
                    answer[key] = value
                if by_address:
                    cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
                    answer.append("Set-Cookie", cookie)
            await send(message)

        app = self._app
        if self._local and not is_loopback(_host(headers)):
            app = PlainTextResponse("this viewer answers to localhost only\n", 403)
        elif self._token is not None and not (by_address or self._in_headers(headers)):
            text = "a token is needed: open the address that `its2clr view` printed\n"
            app = PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, guarded)

    def _in_address(self, scope: Scope) -> bool:
        if self._token is None:
            return False
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
        return any(_same(value.encode("utf-8", "replace"), self._token) for value in given)

    def _in_headers(self, headers: Headers) -> bool:
        assert self._token is not None
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(credentials.strip().encode("latin-1"), self._token):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and _same(cookie.value.encode("utf-8", "replace"), self._session)


def _host(headers: Headers) -> str:
    """The name a request was sent to, without the port; empty if it is no name."""
    found = _HOST.fullmatch(headers.get("host", ""))
    return found["name"] if found else ""


def _same(given: bytes, expected: str) -> bool:
    return hmac.compare_digest(given, expected.encode("utf-8", "replace"))
