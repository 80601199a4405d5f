"""Start the viewer: take the port, say where it is, answer until Ctrl-C."""

import errno
import os
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from its2clr.errors import InputError
from its2clr.viewer.guard import is_loopback

_SECONDS_TO_FINISH = 2


def serve(
    run: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    open_browser: bool | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Show a run in the browser until interrupted.

    Args:
        run: Folder of an evaluated run.
        host: Address to listen at; any but this machine's own needs a token.
        port: Port; 0: any free one.
        token: What a browser has to show; None: none on this machine, a new one elsewhere.
        open_browser: Whether to open one; None: where there is a screen.
        say: Receives what the person has to know.

    Raises:
        InputError: The run cannot be shown, or the address cannot be used.
    """
    import uvicorn

    from its2clr.viewer.app import create_app
    from its2clr.viewer.service import Viewer

    if token is not None and not token.strip():
        raise InputError("--token must not be empty")
    local = is_loopback(host)
    if token is None and not local:
        token = secrets.token_urlsafe(24)
    viewer = Viewer(run)
    listening = listen(host, port)
    try:
        port = listening.getsockname()[1]
        app = create_app(viewer, token=token, local=local, name=f"-{port}")
        shown = address(host, port, token)
        say(f"{run}: {len(viewer.table)} bags, {len(viewer.table.models)} models, {len(viewer.rounds.epochs)} rounds")
        say(f"open {shown}" + ("" if local else " (the token is the key to it: share it with care)"))
        say("Ctrl-C ends it")
        if open_browser if open_browser is not None else has_screen():
            threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=_SECONDS_TO_FINISH
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()
        viewer.close()


def listen(host: str, port: int) -> socket.socket:
    """Take an address.

    Raises:
        InputError: It is taken, or not of this machine.
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


def address(host: str, port: int, token: str | None) -> str:
    """What to open in a browser."""
    name = host.strip("[]")
    if name in {"0.0.0.0", "::"}:  # noqa: S104 - what was asked for, only printed here
        name = socket.gethostname()
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + ("" if token is None else f"?token={quote(token, safe='')}")


def has_screen() -> bool:
    """Whether a person sits before this machine, so that a browser may be opened."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in {"darwin", "win32"} or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
