"""Tiling that is disturbed: a worker killed, the whole command killed, a slide that kills its workers."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest
from tests.cohort.slide_files import draw, write_pyramid
from tests.cohort.work_for_others import always_die, die_once, fail, where_it_runs
from tests.conftest import TINY
from tests.end_to_end.commands import command, environment, its2clr
from tests.test_files import killed_while_writing

from its2clr.cluster.place import Cluster
from its2clr.cluster.workers import WorkersDied
from its2clr.cohort import Cohort, read_tiles, tile_path
from its2clr.cohort.slides import cluster
from its2clr.cohort.slides.cluster import spread
from its2clr.errors import InputError

pytestmark = pytest.mark.xdist_group("slides")
OPTIONS = ["--magnification", 20, "--tile-size", 32, "--workers", 2]


def write_slides(folder, count=12, side=(1000, 750)):
    folder.mkdir()
    rows = ["bag_id,file,label,split"]
    splits = ["train", "val", "test"]
    for number in range(count):
        pixels = draw(*side, seed=number, blobs=6)
        if number % 2:  # positive slides have stripes
            pixels[::4, : side[0] // 2] //= 2
        write_pyramid(folder / f"{number}.tif", pixels)
        rows.append(f"{number},{number}.tif,{number % 2},{splits[number // 2 % 3]}")
    (folder / "slides.csv").write_text("\n".join(rows) + "\n")
    return folder / "slides.csv"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A manifest, and the cohort it becomes when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    manifest = write_slides(folder / "slides")
    its2clr("cohort", "slides", manifest, folder / "out", *OPTIONS)
    return manifest, folder / "out"


def start(manifest, out):
    words = command("cohort", "slides", manifest, out, *OPTIONS)
    return subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_tile_files(out, process, count):
    deadline = time.monotonic() + 120
    while len(list(out.glob("tiles/*.h5"))) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_worker(words):
    return "spawn_main" in words


def content(out):
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.startswith(".")]
    stable = [path for path in files if path.name != "content.json"]  # which holds times
    return {path.relative_to(out): path.read_bytes() for path in stable}


@pytest.mark.slow
def test_a_killed_worker_loses_and_duplicates_nothing(undisturbed, tmp_path):
    manifest, expected = undisturbed
    process = start(manifest, tmp_path / "out")
    wait_for_tile_files(tmp_path / "out", process, 1)
    workers = [child for child in psutil.Process(process.pid).children() if is_worker(" ".join(child.cmdline()))]
    assert len(workers) == 2
    workers[0].kill()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "12 slides (12 tiled, 0 there)" in output
    assert content(tmp_path / "out") == content(expected)


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_stopped(undisturbed, tmp_path):
    manifest, expected = undisturbed
    out = tmp_path / "out"
    process = start(manifest, out)
    wait_for_tile_files(out, process, 3)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive  # workers end with the command
    assert not (out / "bags.csv").exists()
    done = {path: path.stat().st_mtime_ns for path in out.glob("tiles/*.h5")}
    assert 3 <= len(done) < 12
    killed_while_writing(tile_path(out, "7"))
    output = its2clr("cohort", "slides", manifest, out, *OPTIONS).stdout
    assert f"12 slides ({12 - len(done)} tiled, {len(done)} there)" in output
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert content(out) == content(expected)


@pytest.mark.slow
def test_a_piece_is_tried_again_and_a_deadly_one_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "MOST_DEATHS", 1)
    assert dict(spread(die_once, {"a": str(tmp_path / "a")}, Cluster(workers=2))) == {"a": "second try"}
    found = dict(spread(always_die, {name: name for name in ("x", "bad", "y", "z")}, Cluster(workers=2)))
    assert isinstance(found.pop("bad"), WorkersDied)
    assert found == {"x": "x", "y": "y", "z": "z"}


def test_no_other_user_can_give_work_to_the_workers(tmp_path):
    ports = set()
    for _, (worker, threads, on_interrupt) in spread(where_it_runs, dict.fromkeys("abc"), Cluster(workers=2)):
        for process in (psutil.Process(), psutil.Process(worker)):
            ports |= {one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
        assert worker != os.getpid()
        assert (threads, on_interrupt) == ("1", signal.SIG_IGN)
    assert not ports


def test_an_error_ends_the_work_and_says_where_it_was():
    with pytest.raises(OSError, match="the disk is full") as stop:
        list(spread(fail, {"a": "plain"}, Cluster(workers=1)))
    assert "in fail" in stop.value.__notes__[0]
    with pytest.raises(RuntimeError, match="NotToBeSentError: something else"):
        list(spread(fail, {"a": "other"}, Cluster(workers=1)))
    with pytest.raises(InputError, match="at least 1"):
        list(spread(fail, {"a": "plain"}, Cluster(workers=0)))


@pytest.mark.slow
def test_a_cohort_from_slides_goes_through_fit(undisturbed, tmp_path):
    _, out = undisturbed
    cohort = Cohort.open(out)
    tiles = read_tiles(tile_path(out, "0"))
    assert (tiles.mpp, tiles.tile_size_level0) == (pytest.approx(0.5), 32)
    assert len(np.unique(tiles.coords, axis=0)) == len(tiles)
    settings = [part for override in TINY for part in ("--set", override)]
    its2clr("fit", out, "--out", tmp_path / "run", "--recipe", "demo", *settings, "--set", "pretrain.epochs=4")
    assert (tmp_path / "run" / "results.json").exists()
    assert cohort.n_instances > 100


def test_classes_and_stains_are_options_of_the_command(tmp_path):
    manifest = write_slides(tmp_path / "slides", count=1, side=(320, 320))
    square = {"type": "Polygon", "coordinates": [[[0, 0], [160, 0], [160, 320], [0, 320], [0, 0]]]}
    feature = {"type": "Feature", "geometry": square, "properties": {"classification": {"name": "DCIS"}}}
    (manifest.parent / "0.geojson").write_text(json.dumps(feature))
    manifest.write_text("bag_id,file,annotation\n0,0.tif,0.geojson\n")
    options = [*OPTIONS, "--unlabelled", "--min-saturation", 0]
    refused = its2clr("cohort", "slides", manifest, tmp_path / "refused", *options, check=False)
    assert refused.returncode == 2
    assert "DCIS" in refused.stderr
    its2clr("cohort", "slides", manifest, tmp_path / "plain", *options, "--class", "DCIS")
    its2clr("cohort", "slides", manifest, tmp_path / "moved", *options, "--class", "DCIS", "--stain", "vahadane")
    plain, moved = (read_tiles(tile_path(tmp_path / name, "0")) for name in ("plain", "moved"))
    assert (plain.labels == (plain.coords[:, 0] < 160)).all()
    assert np.array_equal(plain.labels, moved.labels)
    assert plain.encoded(0) != moved.encoded(0)


def test_errors_of_the_command_are_one_message(tmp_path):
    manifest = write_slides(tmp_path / "slides", count=2, side=(100, 80))
    for options, message in [
        ([], "either --magnification or --mpp"),
        (["--mpp", "0.5", "--label", "EGFR"], "column 'EGFR' is missing"),
        (["--mpp", "0.5", "--unlabelled", "--overlap", "500"], "overlap must be"),
    ]:
        result = its2clr("cohort", "slides", manifest, tmp_path / "out", *options, check=False)
        assert result.returncode == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr
