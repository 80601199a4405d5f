"""Marks of a person: what is saved is what `its2clr correct` takes, and nobody else can write it."""

import json

import numpy as np
import pytest
from starlette.testclient import TestClient
from tests.viewer.viewer_runs import HOSTILE, write_cohort, write_overlapping, write_run

from its2clr.cohort import Cohort
from its2clr.errors import InputError
from its2clr.refine.corrections import read_corrections
from its2clr.viewer.app import create_app
from its2clr.viewer.serve import Guard
from its2clr.viewer.service import Viewer

ROOT = "http://localhost:8000"
BEARER = {"Authorization": "Bearer k"}


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", write_cohort(tmp_path / "cohort", [f"b{n}" for n in range(8)]), features=False)


def client_of(run, **headers):
    return TestClient(Guard(create_app(Viewer(run)), token="k", local=True), base_url=ROOT, headers=headers)


def corrections(run, folder=None):
    cohort = Cohort.open(run.parent / "cohort")
    train, said = cohort.split("train"), []
    trusted = read_corrections(folder or run / "corrections", train, said.append)
    return {
        bag_id: trusted[start:end].tolist()
        for bag_id, start, end in zip(train.bags["bag_id"], train.offsets(), train.offsets()[1:], strict=False)
    }


def test_what_is_marked_is_what_correct_takes(run):
    client = client_of(run, **BEARER)
    assert not (run / "corrections").exists()
    client.post("/api/bags/1/marks", json={"sense": "positive", "instance": 4})
    outline = [[0, 0], [31, 0], [31, 15], [0, 15]]  # tiles 0 and 1 of three in a row, of 16 pixels
    found = client.post("/api/bags/1/marks", json={"sense": "negative", "outline": outline}).json()
    assert found["instances"] == [0, 0, -1, -1, 1, -1, -1, -1, -1]
    assert corrections(run) == {"b0": [-1] * 9, "b1": found["instances"], "b6": [-1] * 9, "b7": [-1] * 9}
    # the newer mark counts, so no tile is both
    client.post("/api/bags/1/marks", json={"sense": "positive", "instance": 0})
    client.post("/api/bags/1/marks", json={"sense": "none", "instance": 4})
    assert corrections(run)["b1"] == [1, 0, -1, -1, -1, -1, -1, -1, -1]
    for expected in ([1, 0, -1, -1, 1], [0, 0, -1, -1, 1], [-1, -1, -1, -1, 1], [-1] * 5, [-1] * 5):
        assert client.delete("/api/bags/1/marks/last").json()["instances"][:5] == expected
    assert not client.get("/api/bags/1/marks").json()["undo"]
    # another viewer finds what was saved
    client.post("/api/bags/1/marks", json={"sense": "positive", "instance": 8})
    assert client_of(run, **BEARER).get("/api/bags/1/marks").json()["instances"][8] == 1


def test_other_annotations_in_the_file_stay(run):
    other = {"type": "Feature", "properties": {"classification": {"name": "Stroma"}},
             "geometry": {"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 0]]]}}  # fmt: skip
    path = run / "corrections" / "b1.geojson"
    path.parent.mkdir()
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [other]}))
    client_of(run, **BEARER).post("/api/bags/1/marks", json={"sense": "positive", "instance": 2})
    features = json.loads(path.read_text())["features"]
    assert features[0] == other
    assert [one["properties"]["classification"]["name"] for one in features] == ["Stroma", "Confirmed positive"]
    path.write_text("{")
    refused = client_of(run, **BEARER).post("/api/bags/1/marks", json={"sense": "positive", "instance": 3})
    assert refused.status_code == 500
    assert "not whole JSON" in refused.json()["detail"]
    assert path.read_text() == "{"


def test_it_says_which_marks_will_not_be_used(run):
    client = client_of(run, **BEARER)
    notes = {n: client.get(f"/api/bags/{n}/marks").json()["note"] for n in (0, 1, 2, 4)}
    assert "labelled negative" in notes[0]
    assert notes[1] == ""
    assert notes[2].startswith("val bag")
    assert notes[4].startswith("test bag")


def test_a_tile_that_overlaps_others_is_marked_alone(tmp_path):
    run = write_run(tmp_path / "run", write_overlapping(tmp_path / "cohort"), features=False)
    client = client_of(run, **BEARER)
    for step in range(25):
        found = client.post("/api/bags/1/marks", json={"sense": "positive", "instance": step}).json()
        assert found["instances"].count(1) == 1
        assert found["instances"][step] == 1
        client.delete("/api/bags/1/marks/last")


@pytest.mark.parametrize(
    ("mark", "status"),
    [
        ({"sense": "positive"}, 422),
        ({"sense": "positive", "instance": 1, "outline": [[0, 0], [9, 0], [9, 9]]}, 422),
        ({"sense": "maybe", "instance": 1}, 422),
        ({"sense": "positive", "instance": 9}, 404),
        ({"sense": "positive", "instance": -1}, 404),
        ({"sense": "positive", "instance": 1, "file": "/etc/passwd"}, 422),
        ({"sense": "positive", "outline": [[0, 0], [1, 1]]}, 422),
        ({"sense": "positive", "outline": [[0, 0], [1, 1], [2, 2]]}, 500),
        ({"sense": "positive", "outline": [[0, 0], ["NaN", 1], [2, 2]]}, 422),
        ({"sense": "positive", "outline": [[0, 0]] * 20_001}, 422),
    ],
)
def test_what_is_no_mark_is_refused(run, mark, status):
    answer = client_of(run, **BEARER).post("/api/bags/1/marks", json=mark)
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"]
    assert not (run / "corrections").exists()


def test_only_the_viewers_own_page_may_write(run):
    client = client_of(run)
    assert client.get("/", params={"token": "k"}).status_code == 200  # the cookie is there from now on
    mark = {"json": {"sense": "positive", "instance": 1}}
    for origin in (None, "null", "http://evil.example", "http://localhost:9000", "https://localhost:8000",
                   "http://127.0.0.1:8000"):  # fmt: skip
        headers = {} if origin is None else {"Origin": origin}
        assert client.get("/api/run", headers=headers).status_code == 200
        assert client.post("/api/bags/1/marks", headers=headers, **mark).status_code == 403
        assert client.delete("/api/bags/1/marks/last", headers=headers).status_code == 403
    assert not (run / "corrections").exists()
    assert client.post("/api/bags/1/marks", headers={"Origin": ROOT}, **mark).status_code == 200
    client.cookies.clear()
    assert client.post("/api/bags/1/marks", headers={"Origin": ROOT}, **mark).status_code == 401
    assert client.post("/api/bags/1/marks", headers={"Origin": ROOT, "Host": "evil.example"}, **mark).status_code == 403
    large = b'{"sense": "positive", "outline": ' + b" " * 2**20
    assert client.post("/api/bags/1/marks", headers=BEARER, content=large).status_code == 413


def test_marks_are_written_nowhere_else(tmp_path, run):
    folder = tmp_path / "hostile"
    hostile = write_run(folder / "run", write_cohort(folder / "cohort", HOSTILE), features=False)
    client = client_of(hostile, **BEARER)
    for number in range(len(HOSTILE)):
        assert client.post(f"/api/bags/{number}/marks", json={"sense": "negative", "instance": 0}).status_code == 200
    assert len(list((hostile / "corrections").iterdir())) == len(HOSTILE)
    assert {path.suffix for path in (hostile / "corrections").iterdir()} == {".geojson"}
    assert np.all([value[0] == 0 for value in corrections(hostile).values()])
    (run / "corrections").symlink_to(tmp_path)
    with pytest.raises(InputError, match="is a link"):
        Viewer(run)
    Viewer(run, tmp_path / "mine")
