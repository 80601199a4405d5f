"""Start the viewer: take the port, check who asks, say where it is, answer until Ctrl-C."""

import errno
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from its2clr.errors import InputError

_SECONDS_TO_FINISH = 2
_READING = ("GET", "HEAD", "OPTIONS")
_LARGEST_BODY = 2**20
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


def serve(
    folder: str | Path,
    *,
    marks: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    open_browser: bool | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Show a run, or predictions, in the browser until interrupted.

    Args:
        folder: Folder of an evaluated run, or of what `its2clr predict` wrote.
        marks: Folder of the marks that a person makes; None: `corrections` in that folder.
        host: Address to listen at.
        port: Port; 0: any free one.
        token: What a browser must send, also on this machine, which may have other users; None: a new random one.
        open_browser: Whether to open a browser; None: if this machine has a screen.
        say: Prints what the person has to know.

    Raises:
        InputError: The run cannot be shown, or the address cannot be used.
    """
    import uvicorn

    from its2clr.viewer.app import create_app
    from its2clr.viewer.service import Viewer

    if token is not None and not token.strip():
        raise InputError("--token must not be empty")
    local = is_loopback(host)
    token = token or secrets.token_urlsafe(24)
    viewer = Viewer(folder, marks)
    listening = listen(host, port)
    try:
        port = listening.getsockname()[1]
        app = Guard(create_app(viewer), token=token, local=local, name=f"-{port}")
        shown = address(host, port, token=token)
        counts = len(viewer.table), len(viewer.table.models), len(viewer.rounds.epochs)
        say("{}: {} bags, {} models, {} rounds".format(folder, *counts))
        for line in viewer.shown.outdated:
            say(f"warning: scores are out of date: {line}")
        say(f"open {shown}" + ("" if local else " (whoever has this address can see the run: share it with care)"))
        say("press Ctrl-C to stop")
        if open_browser if open_browser is not None else has_screen():
            # All users of the machine can see what programs are called with, so the token is not in this address.
            once = address(host, port, once=app.one_time_code())
            threading.Thread(target=webbrowser.open, args=(once,), daemon=True).start()
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=_SECONDS_TO_FINISH
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()
        viewer.close()


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine alone."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Stands before the app: checks host name and token, and adds the headers that restrict what the page may do.

    A page of another site can make a browser send requests to this machine under the site's own name (DNS rebinding).
    Such a request carries that name as its host, and is refused. A request must have the token in the address
    (`?token=`; the answer then sets a cookie), in that cookie, or as `Authorization: Bearer`.

    Args:
        app: The app.
        token: What a request must carry.
        local: Whether the viewer is for this machine alone.
        name: Tells the cookies of several viewers on one machine apart.
    """

    def __init__(self, app: ASGIApp, *, token: str, local: bool, name: str = "") -> None:
        self._app = app
        self._token = token
        self._local = local
        self._codes: set[str] = set()
        self._cookie = f"its2clr-view{name}"
        # The cookie holds a digest, since a cookie cannot hold every text and a token may be any.
        self._session = hashlib.sha256(f"its2clr view {token}".encode()).hexdigest()

    def one_time_code(self) -> str:
        """A code that stands for the token in the address (`?once=`) of one request."""
        code = secrets.token_urlsafe(24)
        self._codes.add(code)
        return code

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
        elif not (by_address or self._in_headers(headers)):
            text = "a token is needed: open the address that `its2clr view` printed\n"
            app = PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        elif scope["method"] not in _READING:
            app = self._refusal_to_write(scope, headers) or app
        await app(scope, receive, guarded)

    def _refusal_to_write(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        """Why a request that changes something is refused; None if it is not.

        A browser sends the cookie with requests that pages of other programs on this machine make, whose ports differ.
        It also says which page made the request; without that, only a request that carries the token itself is taken.
        """
        expected = f"{scope['scheme']}://{headers.get('host', '')}".lower()
        if headers.get("origin", "").lower() != expected and not self._is_bearer(headers):
            return PlainTextResponse("only the viewer's own page may change something\n", 403)
        length = headers.get("content-length", "")
        if scope["method"] == "POST" and not (length.isdecimal() and int(length) <= _LARGEST_BODY):
            return PlainTextResponse(f"more than {_LARGEST_BODY:,} bytes, or their number is not given\n", 413)
        return None

    def _in_address(self, scope: Scope) -> bool:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        if codes := self._codes.intersection(given.get("once", [])):
            self._codes -= codes
            return True
        return any(_same(value.encode("utf-8", "replace"), self._token) for value in given.get("token", []))

    def _in_headers(self, headers: Headers) -> bool:
        if self._is_bearer(headers):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and _same(cookie.value.encode("utf-8", "replace"), self._session)

    def _is_bearer(self, headers: Headers) -> bool:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and _same(credentials.strip().encode("latin-1"), self._token)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        InputError: The port is taken, or the address is not one of this machine's.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as error:
        raise InputError(f"--host {host}: no such address ({error}); 127.0.0.1 is this machine") from error
    try:
        if os.name != "nt":  # on Windows this would let two programs share the port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen()
    except (OSError, OverflowError) as error:
        listening.close()
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            advice = "stop the program there, or choose another with --port (0: any free one)"
            raise InputError(f"port {port} is taken; {advice}") from error
        if number == errno.EADDRNOTAVAIL:
            raise InputError(f"--host {host}: not an address of this machine") from error
        raise InputError(f"cannot listen at {host}, port {port}: {error}; choose another --port") from error
    return listening


def address(host: str, port: int, **query: str) -> str:
    """The address to open in a browser, with a token or a one-time code."""
    name = host.strip("[]")
    if name in {"0.0.0.0", "::"}:  # noqa: S104 - what was asked for, only printed here
        name = socket.gethostname()
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/?{urlencode(query, quote_via=quote, safe='')}"


def has_screen() -> bool:
    """Whether this program was started at a machine with a screen, where a browser can be opened."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in {"darwin", "win32"} or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _host(headers: Headers) -> str:
    """The host name a request was sent to, without the port; empty if it is not a valid one."""
    found = _HOST.fullmatch(headers.get("host", ""))
    return found["name"] if found else ""


def _same(given: bytes, expected: str) -> bool:
    return hmac.compare_digest(given, expected.encode("utf-8", "replace"))
