"""A hostile client of the viewer: raw requests, odd paths, headers and numbers, with and without the token.

Nothing may be answered without the token, no answer may hold what lies outside the run, none may be a 5xx, and the
viewer lives on and still answers at the end.
"""

import random
import re
import socket
import subprocess

import psutil

from tests.campaign.content import content
from tests.campaign.machine import draw_of
from tests.campaign.places import Places
from tests.campaign.tally import Clock, Part
from tests.end_to_end.commands import command, environment

SECRET = "not-for-any-client-7f3a"
TOKEN = "campaign-token"
SECONDS = 20.0
METHODS = ("GET",) * 30 + ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW", "get", "GET GET")
PIECES = (
    "api", "bags", "run", "static", "0", "1", "-1", "99999999999999999999", "1e9", "instances", "neighbours", "image",
    "dzi", "tiles", "scores", "index.html", "..", "%2e%2e", "..%2f..%2f", "%00", "....//", "\\..\\", "secret.txt",
    "etc", "passwd", "0_0.jpg", "-1_-1.jpg", "9_9999999999.jpg", "%ff%fe", "тест", "a" * 3000, "<script>", "'", '"',
    "openseadragon", "config.yaml", "state.json", "results.json",
)  # fmt: skip
QUERIES = (
    "", "?model=start", "?model=../../x", "?round=1", "?round=-1", "?round=99999999999999999999999", "?page=-1",
    "?page=1000000000", "?query=%00", "?query=" + "(" * 400, "?sort=bag", "?sort=__class__", "?split=test", "?split=x",
    "?descending=maybe", "?model=" + "m" * 5000, "?query=[", "?token=wrong", "?once=guess", "?errors=1&errors=2",
)  # fmt: skip
HEADERS = (
    "Host: 127.0.0.1", "Host: evil.example", "Host: localhost", "Host: [::1]", "Host: 127.0.0.1:99999", "Host:",
    "If-None-Match: *", "If-None-Match: \"x\"", "Range: bytes=0-1", "Range: bytes=-99999999999999", "Cookie: a=b; a",
    "Cookie: its2clr-view=" + "0" * 64, "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999",
    "Transfer-Encoding: chunked", "Authorization: Bearer wrong", "Authorization: Bearer \xff", "X: " + "y" * 9000,
    "Upgrade: websocket\r\nConnection: Upgrade", "Expect: 100-continue", "no colon here", "Accept-Encoding: \x00",
)  # fmt: skip


def viewer(places: Places, part: Part, clock: Clock, seed: int, *, short: bool = False) -> None:
    """Send requests until the time is up."""
    (places.run.parent / "secret.txt").write_text(SECRET)
    before = [content(places.run), content(places.cohort)]
    words = command("view", places.run, "--port", "0", "--no-open", "--token", TOKEN)
    part.notes["answers"] = {}
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            found = re.search(r"127\.0\.0\.1:(\d+)", "".join(lines))
            if found is None:
                part.failed("view", f"other: did not start: {lines}")
                return
            number = 0
            while number < (150 if short else 300) or not clock.over():
                _one_request(int(found[1]), draw_of(seed, "viewer", number), part, number)
                number += 1
                if process.poll() is not None:
                    part.failed("view", f"other: the viewer ended with {process.returncode} at request {number}")
                    return
            part.peak = max(part.peak, psutil.Process(process.pid).memory_info().rss)
            _still_answers(int(found[1]), part)
        finally:
            process.kill()
        said = process.stderr.read()
    if before != [content(places.run), content(places.cohort)]:
        part.failed("view", "outside: changed the run or the cohort that it showed")
    if "Traceback" in said:
        part.failed("view", f"traceback: {said[-1500:]}")


def _one_request(port: int, draw: random.Random, part: Part, number: int) -> None:
    trusted = draw.random() < 0.6
    raw = _request(draw, trusted=trusted)
    part.tried("with the token" if trusted else "without the token")
    answer = _send(port, raw, draw)
    what = f"request {number}: {raw[:200]!r}"
    if answer is None:
        part.failed(what, f"hung: no answer in {SECONDS:.0f} s")
        return
    status = answer.split(b" ", 2)[1].decode("latin-1") if answer.startswith(b"HTTP/") else "closed"
    part.notes["answers"][status] = part.notes["answers"].get(status, 0) + 1
    if status.startswith("5"):
        part.failed(what, f"other: answered {status}: {answer[-300:]!r}")
    if SECRET.encode() in answer or b"root:x:" in answer:
        part.failed(what, "outside: sent a file that is not of the run")
    if not trusted and status.startswith(("2", "3")):
        part.failed(what, f"outside: answered {status} without the token")


def _request(draw: random.Random, *, trusted: bool) -> bytes:
    path = "/" + "/".join(draw.choice(PIECES) for _ in range(draw.randint(0, 7)))
    if draw.random() < 0.4:  # a real one, with odd numbers
        numbers = [draw.choice(("0", "1", "7", "-1", "55", "56", "10000000000000000000000", "x")) for _ in range(4)]
        path = draw.choice(
            (
                "/", "/api/run", "/api/bags", f"/api/bags/{numbers[0]}", f"/api/bags/{numbers[0]}/scores",
                f"/api/bags/{numbers[0]}/dzi", f"/api/bags/{numbers[0]}/instances/{numbers[1]}",
                f"/api/bags/{numbers[0]}/instances/{numbers[1]}/image",
                f"/api/bags/{numbers[0]}/instances/{numbers[1]}/neighbours",
                f"/api/bags/{numbers[0]}/tiles/{numbers[1]}/{numbers[2]}_{numbers[3]}.jpg", "/static/../app.py",
            )
        )  # fmt: skip
    headers = [draw.choice(HEADERS) for _ in range(draw.choice((0, 0, 0, 1, 1, 3)))]
    if not any(header.startswith("Host") for header in headers) and draw.random() < 0.9:
        headers.insert(0, "Host: 127.0.0.1")
    if trusted:
        headers.append(f"Authorization: Bearer {TOKEN}")
    headers.append("Connection: close")
    version = draw.choice(("HTTP/1.1",) * 30 + ("HTTP/1.0", "HTTP/9.9", "", "HTTP/1.1 x"))
    text = f"{draw.choice(METHODS)} {path}{draw.choice(QUERIES)} {version}\r\n" + "\r\n".join(headers) + "\r\n\r\n"
    raw = text.encode("latin-1", "replace") + draw.choice((b"",) * 9 + (b"12345", b"\0" * 2000))
    if draw.random() < 0.1:  # bytes changed, never those that carry a token
        place = draw.randrange(len(raw))
        raw = raw[:place] + draw.randbytes(3) + raw[place + 3 :]
    return raw


def _send(port: int, raw: bytes, draw: random.Random) -> bytes | None:
    """The answer; empty if the viewer closed the connection; None if it said nothing in time."""
    cut = draw.random() < 0.05
    more = any(word in raw for word in (b"Content-Length", b"Transfer-Encoding", b"Expect")) or not _is_whole(raw)
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        try:
            connection.sendall(raw[: draw.randrange(len(raw))] if cut else raw)
            if cut or more:  # the viewer may wait for the rest: say that none will come
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        except TimeoutError:
            return None
        except OSError:
            return b""
    return answer


def _is_whole(raw: bytes) -> bool:
    """Whether a request looks as it was made, with its end and no bytes changed in it."""
    return raw.isascii() and b"\r\n\r\n" in raw and b"Connection: close" in raw


def _still_answers(port: int, part: Part) -> None:
    request = f"GET /api/run HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
    answer = _send(port, request.encode(), random.Random(3))
    if not (answer or b"").startswith(b"HTTP/1.1 200"):
        part.failed("view", f"other: does not answer any more: {(answer or b'')[:200]!r}")
