"""Commands that only read what a run or a prediction left do not wait for the libraries that train."""

import subprocess
import sys

import numpy as np
import pytest
from tests.cohort.feature_files import grid, trident
from tests.cohort.slide_files import draw, write_pyramid
from tests.end_to_end.commands import environment

from its2clr.predict.new_bags import predict

HEAVY = {"torch", "torchvision", "torchmetrics", "lightning", "timm"}
RUN_COMMAND = """
import sys
from its2clr.cli import app
app(sys.argv[1:], standalone_mode=False)
"""
OPEN_VIEWER = """
import sys
from its2clr.viewer.app import create_app
from its2clr.viewer.service import Viewer
viewer = Viewer(sys.argv[1])
create_app(viewer).routes
for number in range(min(len(viewer.table), 8)):
    viewer.bag(number), viewer.thumbnail(number), viewer.marked(number), viewer.picture_tile(number, 5, 0, 0)
"""
TELL = """
import pathlib, re
status = pathlib.Path("/proc/self/status")  # what `resource` gives begins with the memory of the parent
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) // 1024 if status.exists() else 0
print('LOADED', peak, *{name.partition('.')[0] for name in sys.modules})
"""
MOST_MEGABYTES = 400


def loaded(code, *arguments):
    """The packages in use when some code ends; it must not have taken much memory."""
    words = [sys.executable, "-c", code + TELL, *map(str, arguments)]
    said = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    _, peak, *packages = said.stdout.splitlines()[-1].split()
    assert int(peak) < MOST_MEGABYTES
    return set(packages)


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        (["map", "--limit", "1", "--longest", "100", "--out"], {"sklearn", "tifffile"}),
        (["geojson", "--limit", "1", "--out"], {"sklearn", "matplotlib"}),
        (["report", "--out"], {"sklearn", "tifffile", "matplotlib"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_shows_a_run_needs_no_torch(evaluated_run, tmp_path, command, unneeded):
    name, *options = command
    found = loaded(RUN_COMMAND, name, evaluated_run, *options, tmp_path / "out")
    assert (tmp_path / "out").exists()
    assert not found & (HEAVY | unneeded)


def test_scoring_predictions_needs_no_torch(evaluated_run, tiny_cohort, tmp_path):
    predict(evaluated_run, tiny_cohort, tmp_path / "predicted", quiet=True)
    found = loaded(RUN_COMMAND, "score", tmp_path / "predicted", tiny_cohort / "bags.csv", "--split", "test")
    assert not found & (HEAVY | {"sklearn", "scipy", "matplotlib"})


def test_the_viewer_needs_no_torch(evaluated_run, tiny_cohort, tmp_path):
    predict(evaluated_run, tiny_cohort, tmp_path / "predicted", quiet=True)
    for shown in (evaluated_run, tmp_path / "predicted"):
        assert not loaded(OPEN_VIEWER, shown) & (HEAVY | {"sklearn", "matplotlib"})


@pytest.mark.parametrize("kind", ["slides", "features"])
def test_making_a_cohort_needs_no_torch(kind, tmp_path):
    (tmp_path / kind).mkdir()
    if kind == "slides":
        write_pyramid(tmp_path / kind / "a.tif", draw(400, 300, blobs=6))
    else:
        trident(tmp_path / kind / "a.h5", np.zeros((4, 8), np.float32), grid(2, 2))
    scale = ["--magnification", "20", "--tile-size", "32", "--workers", "1"] if kind == "slides" else []
    found = loaded(RUN_COMMAND, "cohort", kind, tmp_path / kind, tmp_path / "out", *scale)
    assert (tmp_path / "out" / "bags.csv").is_file()
    assert not found & (HEAVY | {"sklearn", "matplotlib"})
