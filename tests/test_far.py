"""Files far away: a real S3 server (moto) in a process of its own, and web servers of a few lines."""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from its2clr import cli, far
from its2clr.cohort import Cohort, pack_images, read_manifest, read_tiles, tile_path
from its2clr.cohort.canvas import open_canvas
from its2clr.cohort.features.feature_cohort import pack_features
from its2clr.cohort.features.feature_manifest import read_feature_manifest
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.errors import InputError
from its2clr.predict.inputs import sort_inputs
from tests.cohort.feature_files import grid, trident
from tests.cohort.slide_files import draw, write_pyramid

pytestmark = pytest.mark.xdist_group("far")
ROOT = Path(__file__).parents[1]
MOTO = ROOT / ".moto"
NO_MOTO = "moto, the S3 server, is not there: `make s3` brings it"
SETTINGS = SlideSettings(mpp=1.0, tile_size=32, encoding="png")


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if not (MOTO.is_dir() or find_spec("moto")):
        pytest.skip(NO_MOTO)
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(MOTO), "HOME": str(tmp_path_factory.mktemp("home"))}
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        for _ in range(600):
            with socket.socket() as place:
                if place.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "moto ended"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        process.kill()


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An environment that knows no account, and a cache of this test."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "ITS2CLR_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # never ask the machine's own
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("ITS2CLR_FAR_FOLDER", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Bucket:
    def __init__(self, server, name):
        self.url, self.address = f"{server}/{name}", Path(f"s3://{name}")
        self._ask(self.url, method="PUT")

    def _ask(self, url, **more):
        signature = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"
        headers = {"Authorization": signature, "Content-Type": "application/octet-stream"}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(urllib.request.Request(url, headers=headers, **more)).read()

    def put(self, key, content):
        self._ask(f"{self.url}/{key}", method="PUT", data=content)
        return self.address / key

    def put_folder(self, folder, prefix):
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return self.address / prefix


@pytest.fixture
def bucket(server, here, monkeypatch, request):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return Bucket(server, f"b{abs(hash(request.node.name))}")


def read(path):
    with far.local(path) as file:
        return file.read_bytes()


def entries(cache):
    return {path: path.stat().st_ino for path in cache.glob("*/*") if not path.name.startswith(".")}


def ends(monkeypatch, capsys, *words):
    """The one line with which a command ends that exits 2."""
    monkeypatch.setattr(sys, "argv", ["its2clr", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_object_is_fetched_once_and_anew_when_it_has_changed(bucket, here):
    path = bucket.put("a/one.bin", b"first")
    assert read(path) == b"first"
    before = entries(here)
    assert read(path) == b"first"
    assert entries(here) == before
    bucket.put("a/one.bin", b"other")  # as long, and within the same second
    assert read(path) == b"other"


def test_the_cache_drops_what_was_used_longest_ago_and_nothing_in_use(bucket, here, monkeypatch):
    monkeypatch.setenv("ITS2CLR_FAR_GB", "0.001")
    one, two, three = (bucket.put(name, name.encode() * 40_000) for name in ("aaaaaaaaaa", "bbbbbbbbbb", "cccccccccc"))
    read(one), read(two), read(one), read(three)
    assert sorted(path.name for path in entries(here)) == [one.name, three.name]
    with far.local(one), far.local(three) as held:
        with pytest.raises(InputError, match="781 KiB of them in use by commands that run; set ITS2CLR_FAR_GB"):
            read(two)
        assert held.read_bytes() == b"cccccccccc" * 40_000
    assert read(two) == b"bbbbbbbbbb" * 40_000


READ_OFTEN = """
import random, sys
from pathlib import Path
from its2clr import far

def size(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:  # dropped meanwhile
        return 0

for turn in range(30):
    letter = random.choice("abcd")
    with far.local(Path(sys.argv[1]) / letter) as file:
        assert file.read_bytes() == letter.encode() * 300_000, letter
        held = sum(size(path) for path in Path(sys.argv[2]).glob("[0-9a-f]*/?"))
        assert held <= 1_000_000, held
"""


def test_several_processes_share_the_cache_within_its_bound(bucket, here, monkeypatch):
    monkeypatch.setenv("ITS2CLR_FAR_GB", "0.001")  # three of four, for two processes
    for letter in "abcd":
        bucket.put(letter, letter.encode() * 300_000)
    words = [sys.executable, "-c", READ_OFTEN, str(bucket.address), str(here)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    processes = [subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[1] for process in processes] == ["", ""]


class Silent:
    """A server that says the same to everybody, keeps the connection and falls silent; it counts who came."""

    def __init__(self, answer=b""):
        self.visits, self._answer, self._open = 0, answer, []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.visits += 1
            self._open.append(connection)
            connection.recv(65536)
            connection.sendall(self._answer)

    def close(self):
        for one in (self._socket, *self._open):
            one.close()


@pytest.fixture
def silent():
    servers = []
    yield lambda *answer: servers.append(Silent(*answer)) or servers[-1]
    for one in servers:
        one.close()


def test_a_web_server_is_read_too(here, tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a b.csv").write_text("bag_id")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "web")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        assert read(Path(f"http://127.0.0.1:{web.server_port}/a%20b.csv")) == b"bag_id"
        with pytest.raises(FileNotFoundError, match="no such object"):
            read(Path(f"http://127.0.0.1:{web.server_port}/none.csv"))
        web.shutdown()


def test_a_server_that_falls_silent_is_one_line_and_leaves_no_file(here, silent, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("ITS2CLR_FAR_SECONDS", "0.2")
    begun = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n"
    for answer in (b"", begun):
        address = f"{silent(answer).url}/slides.csv"
        line = ends(monkeypatch, capsys, "cohort", "slides", address, tmp_path / "out", "--mpp", 1)
        assert line.startswith(f"error: {address}: the server stopped answering for 0.2 s; the same command goes on")
    assert entries(here) == {}
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_far_away_is_one_line(bucket, monkeypatch, capsys, tmp_path):
    slides = partial(ends, monkeypatch, capsys, "cohort", "slides")
    rest = (tmp_path / "out", "--mpp", 1)
    assert slides(f"s3://{bucket.address.name}/none.csv", *rest).endswith("none.csv: does not exist")
    assert "there is no bucket nobucket" in slides("s3://nobucket/slides.csv", *rest)
    assert "there is no bucket nobucket" in slides("s3://nobucket/slides", *rest)
    address = f"s3://{bucket.address.name}/cohort"
    assert f"{address}: there is nothing below this address" in ends(monkeypatch, capsys, "fit", address)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "there are no credentials; set AWS_ACCESS_KEY_ID and" in slides("s3://some/slides.csv", *rest)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    bucket.put("slides.csv", b"bag_id")
    line = slides(f"s3://{bucket.address.name}/slides.csv", *rest)
    assert "slides.csv: the server denies access; check the credentials" in line


@pytest.mark.parametrize(
    "address",
    ["s3://user:password@bucket/a", "https://host/a?signature=secret", "s3://bucket/../a", "s3:///a", "s3://bucket"],
)
def test_addresses_that_are_not_read(here, address):
    with pytest.raises(InputError, match=r"cannot be read; expected s3|names no object") as error:
        read(Path(address))
    assert "password@" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.fixture
def slides(tmp_path):
    """Six slides, one of each class in each split, and their manifest."""
    (tmp_path / "slides").mkdir()
    rows = ["bag_id,file,label,split"]
    for split in ("train", "val", "test"):
        for label in (0, 1):
            write_pyramid(tmp_path / "slides" / f"{split}-{label}.tif", draw(320, 240, seed=len(rows)))
            rows.append(f"{split}-{label},{split}-{label}.tif,{label},{split}")
    (tmp_path / "slides" / "slides.csv").write_text("\n".join(rows) + "\n")
    return tmp_path / "slides"


def test_slides_far_away_give_the_cohort_of_the_same_slides_here(bucket, here, slides, tmp_path, monkeypatch):
    near = pack_slides(read_slide_manifest(slides / "slides.csv"), tmp_path / "near", SETTINGS, workers=1)
    (slides / "slides.csv").open("a").write("gone,gone.tif,1,train\n")
    place = bucket.put_folder(slides, "scans")
    sizes = [path.stat().st_size for path in slides.glob("*.tif")]
    monkeypatch.setenv("ITS2CLR_FAR_GB", str(2.5 * max(sizes) / 1e9))  # not all of them at once

    def pack():
        return pack_slides(read_slide_manifest(place / "slides.csv"), tmp_path / "far", SETTINGS, workers=1)

    first = pack()
    bags, others = (Cohort.open(one.path).identity().bags for one in (near, first))
    assert bags == others
    assert [(one.bag_id, one.problem) for one in first.left_out] == [("gone", "there is no such object")]
    tiles = read_tiles(tile_path(tmp_path / "far", "val-1"))
    assert tiles.source == f"s3://{bucket.address.name}/scans/val-1.tif"
    assert pack().n_packed == 0
    bucket.put("scans/val-1.tif", (slides / "val-0.tif").read_bytes())
    again = pack()
    assert (again.n_packed, again.n_skipped) == (1, 5)


def test_a_cohort_far_away_is_a_cohort(bucket, here, slides, tmp_path, monkeypatch, capsys):
    pack_slides(read_slide_manifest(slides / "slides.csv"), tmp_path / "near", SETTINGS, workers=1)
    (tmp_path / "near" / "decoded").mkdir()
    (tmp_path / "near" / "decoded" / "large").write_text("made here")
    place = bucket.put_folder(tmp_path / "near", "cohorts/near")
    monkeypatch.setattr(sys, "argv", ["its2clr", "doctor", str(place)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code in (None, 0)
    assert "0 errors" in capsys.readouterr().out
    found = far.folder_here(place)
    assert Cohort.open(found).identity().digest == Cohort.open(tmp_path / "near").identity().digest
    assert not (found / "decoded").exists()
    assert sort_inputs([place], "slides").cohorts == [found]
    monkeypatch.setenv("ITS2CLR_FAR_GB", "0.000001")
    with pytest.raises(InputError, match="in use by commands that run"):  # it stays until this process ends
        read(bucket.put("more", b"m" * 2000))


def test_inputs_to_predict_far_away(bucket, here, slides, tmp_path):
    place = bucket.put_folder(slides, "scans")
    found = sort_inputs([place, place / "val-0.tif"], "slides")
    assert [slide.bag_id for slide in found.slides] == [
        f"{split}-{n}" for split in ("test", "train", "val") for n in "01"
    ]
    with pytest.raises(InputError, match=r"scans/none.tif: there is no such file or folder"):
        sort_inputs([place / "none.tif"], "slides")


def test_features_far_away_give_the_cohort_of_the_same_files_here(bucket, here, tmp_path):
    rows = ["bag_id,label,split,file"]
    for number, split in enumerate(("train", "train", "val", "val", "test", "test")):
        features = np.random.default_rng(number).normal(size=(6, 8)).astype(np.float32)
        trident(tmp_path / "features" / f"case-{number}.h5", features, grid(3, 2))
        rows.append(f"case-{number},{number % 2},{split},s3://elsewhere/never-fetched.svs")
    (tmp_path / "features" / "bags.csv").write_text("\n".join(rows) + "\n")
    place = bucket.put_folder(tmp_path / "features", "f")
    (bucket.put("f/case-9.h5", b"no HDF5"), rows.append("case-9,1,train,"))
    manifest = bucket.put("f/more.csv", "\n".join(rows).encode())
    far_away = pack_features(read_feature_manifest(manifest, place), tmp_path / "far")
    local = (tmp_path / "features" / "bags.csv").read_text().replace("s3://elsewhere/never-fetched.svs", "")
    (tmp_path / "features" / "bags.csv").write_text(local)
    near = pack_features(
        read_feature_manifest(tmp_path / "features" / "bags.csv", tmp_path / "features"), tmp_path / "near"
    )
    assert Cohort.open(far_away.path).identity().bags == Cohort.open(near.path).identity().bags
    (left_out,) = far_away.left_out
    assert left_out.file == f"s3://{bucket.address.name}/f/case-9.h5"
    assert str(here) not in left_out.problem


def test_images_far_away_give_the_cohort_of_the_same_images_here(bucket, here, tmp_path):
    rows = ["bag_id,path,label,split"]
    for number, split in enumerate(("train", "train", "val", "val", "test", "test")):
        (tmp_path / "images" / f"bag-{number}").mkdir(parents=True)
        for one in range(2):
            pixels = np.random.default_rng(10 * number + one).integers(0, 255, (80, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / f"bag-{number}" / f"{one}.png")
        rows.append(f"bag-{number},bag-{number},{number % 2},{split}")
    (tmp_path / "images" / "bags.csv").write_text("\n".join(rows) + "\n")
    place = bucket.put_folder(tmp_path / "images", "images")
    near = pack_images(read_manifest(tmp_path / "images" / "bags.csv"), tmp_path / "near", encoding="png")
    far_away = pack_images(read_manifest(place / "bags.csv"), tmp_path / "far", encoding="png")
    assert Cohort.open(far_away.path).identity().bags == Cohort.open(near.path).identity().bags
    assert [one.folder.name for one in sort_inputs([place], "images").folders] == [f"bag-{n}" for n in range(6)]


def test_an_address_in_a_file_of_someone_else_is_never_visited(here, silent, tmp_path, monkeypatch, capsys, slides):
    """A tile file that names a slide far away, and a run that names a cohort far away."""
    server = silent()
    manifest = read_slide_manifest(slides / "slides.csv")
    pack_slides(manifest, tmp_path / "cohort", SETTINGS, workers=1)
    path = tile_path(tmp_path / "cohort", "val-1")
    import h5py

    with h5py.File(path, "r+") as h5:
        assert h5.attrs["source"].endswith("val-1.tif")
        h5.attrs["source"] = f"{server.url}/val-1.tif"
    with open_canvas(read_tiles(path)) as canvas:
        assert not canvas.is_slide
    with pytest.raises(InputError):
        Cohort.open(f"{server.url}/cohort")
    assert server.visits == 0


def test_annotations_are_read_from_this_machine_only(bucket, slides):
    table = (slides / "slides.csv").read_text().replace("split\n", "split,annotation\n", 1)
    manifest = bucket.put("m.csv", table.replace(",train\n", ",train,a.xml\n", 1).encode())
    with pytest.raises(InputError, match=r"annotations are read from this machine; copy them, .* --annotations-root"):
        read_slide_manifest(manifest, slides_root=slides)
