"""Commands on a disk that fills up: one line, exit code 2, and the same command goes on when there is room."""

import json
import os
import signal
import subprocess
import time

import pytest
from tests.end_to_end.commands import command, environment, its2clr, tiny_settings


@pytest.fixture
def disk(tmp_path):
    """A disk of its own, and a function that sets its size in KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")

    def resize(kib):
        subprocess.run(["mount", "-o", f"remount,size={kib}k", str(folder)], check=True)

    yield folder, resize
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fails_for_want_of_room(disk, *words):
    result = its2clr(*words, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"error: {disk}")
    assert "no space left on device while writing" in result.stderr
    assert "free there" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stdout
    assert not list(disk.rglob(".*.part"))


def test_drawing_a_cohort_goes_on_when_there_is_room(disk, tiny_cohort):
    folder, resize = disk
    resize(300)
    words = ("cohort", "synthetic", folder / "cohort", "--size", "tiny")
    fails_for_want_of_room(folder, *words)
    done = {path: path.stat().st_mtime_ns for path in folder.rglob("*.h5")}
    assert done
    resize(64_000)
    its2clr(*words)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    files = [path for path in tiny_cohort.rglob("*") if path.is_file() and path.name != "content.json"]  # has times
    names = [path.relative_to(tiny_cohort) for path in files]
    assert all((folder / "cohort" / name).read_bytes() == (tiny_cohort / name).read_bytes() for name in names)
    hashes = [json.loads((one / "content.json").read_text())["bags"] for one in (folder / "cohort", tiny_cohort)]
    assert {bag: own[3:] for bag, own in hashes[0].items()} == {bag: own[3:] for bag, own in hashes[1].items()}


@pytest.mark.slow
def test_a_run_goes_on_when_there_is_room(disk, tiny_cohort):
    folder, resize = disk
    words = ("fit", tiny_cohort, "--out", folder / "run", *tiny_settings())
    for kib in (100, 1500):  # no checkpoint fits; the start fits, the refinement does not
        resize(kib)
        fails_for_want_of_room(folder, *words)
    done = json.loads((folder / "run" / "state.json").read_text())["stages"]
    assert {"pretrain", "aggregate start"} <= done.keys()
    assert "refine" not in done
    resize(64_000)
    said = its2clr(*words).stdout
    assert "pretrain: already done" in said
    assert (folder / "run" / "results.json").is_file()


@pytest.mark.slow
def test_a_training_that_slurm_stops_says_how_to_go_on(tiny_cohort, tmp_path):
    run = tmp_path / "run"
    words = command("pretrain", tiny_cohort, "--out", run, *tiny_settings(), "--set", "pretrain.epochs=100000")
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 200
        while not (run / "checkpoints" / "pretrain.safetensors").is_file():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGTERM)
        said, error = process.communicate(timeout=60)
    assert process.returncode == 143
    assert error == "stopped by SIGTERM; the same command goes on where it stopped\n"
    assert "pretrain: saved after epoch" in said.splitlines()[-1]
