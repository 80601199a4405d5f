import io
import math
import time
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from starlette.testclient import TestClient
from tests.viewer.viewer_runs import EPOCHS, HOSTILE, MODELS, write_cohort, write_large_cohort, write_run

from its2clr.cohort.canvas import open_canvas
from its2clr.cohort.features.feature_file import feature_path, read_feature_file
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.cohort.tiles import decode
from its2clr.errors import InputError
from its2clr.run.scores import Model, RunScores
from its2clr.viewer import deep_zoom, neighbours
from its2clr.viewer.app import create_app
from its2clr.viewer.deep_zoom import OVERLAP, TILE, DeepZoom
from its2clr.viewer.serve import Guard
from its2clr.viewer.service import Viewer


def client_of(run):
    viewer = Viewer(run)
    app = Guard(create_app(viewer), token="k", local=True)
    return TestClient(app, base_url="http://localhost:8000", headers={"Authorization": "Bearer k"}), viewer


@pytest.fixture(scope="module")
def demo(evaluated_run):
    client, viewer = client_of(evaluated_run)
    yield client
    viewer.close()


@pytest.fixture(scope="module")
def scores(evaluated_run):
    return RunScores(evaluated_run)


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    plain = [f"bag {number}" for number in range(8)]
    return write_run(folder / "run", write_cohort(folder / "cohort", HOSTILE + plain))


@pytest.fixture(scope="module")
def hostile(hostile_run):
    client, viewer = client_of(hostile_run)
    yield client
    viewer.close()


def test_the_run_is_described(demo, scores):
    found = demo.get("/api/run").json()
    assert [(one["encoder"], one["aggregator"]) for one in found["models"]] == list(scores.models)
    assert found["best"] == "refined+dsmil"
    assert [one["epoch"] for one in found["rounds"]] == scores.rounds
    assert [one["validation_auc"] for one in found["rounds"]] == [
        one["validation_auc"] for one in scores.results["rounds"]
    ]
    assert found["n_bags"] == len(scores.cohort)
    assert found["has_truth"]
    assert "bag_threshold" in found["models"][1]


@pytest.mark.parametrize("model", [None, *MODELS[:2]])
def test_scores_are_those_of_the_run(demo, scores, model):
    key = {} if model is None else {"model": "+".join(model)}
    listed = {row["n"]: row for row in demo.get("/api/bags", params=key).json()["rows"]}
    for number, bag_id in enumerate(scores.cohort.bags["bag_id"][:6]):
        expected = scores.bag(bag_id, None if model is None else Model(*model))
        found = demo.get(f"/api/bags/{number}/scores", params=key).json()
        assert found["probability"] == expected.instances.tolist()
        assert found["bag_probability"] == expected.probability
        assert math.isclose(listed[number]["probability"], expected.probability, rel_tol=1e-12)
        bag = demo.get(f"/api/bags/{number}").json()
        assert bag["bag_id"] == bag_id
        assert bag["coords"] == expected.coords.tolist()
        assert bag["side"] == expected.side
        assert bag["truth"] == expected.truth.tolist()


def test_rounds_are_of_training_bags_alone(demo, scores):
    split = scores.cohort.bags["split"]
    train, test = int(np.flatnonzero(split == "train")[-1]), int(np.flatnonzero(split == "test")[0])
    for epoch in scores.rounds:
        table = scores.round(epoch)
        expected = table[table["bag_id"] == scores.cohort.bags["bag_id"][train]]
        found = demo.get(f"/api/bags/{train}/scores?round={epoch}").json()
        for name in ("probability", "pseudo_label", "selected"):
            assert found[name] == expected[name].tolist()
        refused = demo.get(f"/api/bags/{test}/scores?round={epoch}")
        assert refused.status_code == 404
        assert "training bags only" in refused.json()["detail"]
    assert demo.get(f"/api/bags/{train}").json()["rounds"] == {"available": True, "reason": ""}
    assert "training bags only" in demo.get(f"/api/bags/{test}").json()["rounds"]["reason"]
    assert demo.get(f"/api/bags/{train}/scores?round=77").status_code == 404


def test_an_instance_tells_all_that_is_known(demo, scores):
    bag_id = scores.cohort.bags["bag_id"][0]
    tiles = scores.cohort.tile_file(bag_id)
    found = demo.get("/api/bags/0/instances/5").json()
    assert (found["x"], found["y"]) == tuple(tiles.coords[5].tolist())
    assert found["name"] == tiles.names[5]
    assert found["truth"] == tiles.labels[5]
    for one, model in zip(found["models"], scores.models, strict=True):
        probabilities = scores.bag(bag_id, model).instances
        assert one["probability"] == probabilities[5]
        assert one["rank"] == sorted(probabilities, reverse=True).index(probabilities[5]) + 1
    for one in found["rounds"]:
        row = scores.round(one["epoch"]).query("bag_id == @bag_id and instance == 5").iloc[0]
        assert one["pseudo_label"] == row["pseudo_label"]
        assert one["selected"] == row["selected"]
        assert one["probability"] == row["probability"]
    assert [one["epoch"] for one in found["rounds"]] == scores.rounds
    image = demo.get(f"/{found['image']}")
    assert image.content == tiles.encoded(5)
    assert image.headers["content-type"] == "image/png"


def test_neighbours_are_the_nearest_by_cosine(demo, scores, evaluated_run):
    found = demo.get("/api/bags/3/instances/2/neighbours", params={"model": "start+dsmil"}).json()
    bag_ids = scores.cohort.bags["bag_id"].tolist()

    def features(number):
        return read_feature_file(feature_path(evaluated_run / "features" / "start", bag_ids[number])).features

    def cosine(a, b):
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    own = features(3)[2]
    within = sorted(((cosine(own, other), i) for i, other in enumerate(features(3)) if i != 2), reverse=True)
    assert [one["instance"] for one in found["within"]["found"]] == [i for _, i in within[: neighbours.NEAREST]]
    assert {one["bag"] for one in found["within"]["found"]} == {3}
    test = np.flatnonzero(scores.cohort.bags["split"] == "test").tolist()
    across = sorted(((cosine(own, f), bag, i) for bag in test for i, f in enumerate(features(bag))), reverse=True)
    top = [(one["bag"], one["instance"]) for one in found["across"]["found"]]
    assert top == [(bag, i) for _, bag, i in across[: neighbours.NEAREST]]
    assert found["across"]["found"][0]["similarity"] == pytest.approx(across[0][0], abs=1e-5)
    first = found["across"]["found"][0]
    assert (
        first["probability"] == scores.bag(bag_ids[first["bag"]], Model("start", "dsmil")).instances[first["instance"]]
    )
    assert "16 test bags" in found["across"]["searched"]


def test_a_search_that_would_be_too_large_takes_a_part_and_says_so(evaluated_run, monkeypatch):
    monkeypatch.setattr(neighbours, "MOST_BAGS", 4)
    monkeypatch.setattr(neighbours, "MOST_VALUES", 16 * 4 * 3)
    client, viewer = client_of(evaluated_run)
    found = client.get("/api/bags/3/instances/2/neighbours").json()["across"]
    assert "evenly spaced in 4 of 16 test bags" in found["searched"]
    assert len({one["bag"] for one in found["found"]}) <= 4
    assert len(found["found"]) == 8
    viewer.close()


def test_without_features_it_says_how_to_get_them(tmp_path):
    run = write_run(tmp_path / "run", write_cohort(tmp_path / "cohort", [f"b{n}" for n in range(6)]), features=False)
    client, _ = client_of(run)
    assert "its2clr extract" in client.get("/api/bags/0/instances/0/neighbours").json()["problem"]


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    """A run over slides of many colours: one pyramid in two levels, flat ones, one that has gone."""
    import tifffile

    folder = tmp_path_factory.mktemp("slide-run")
    y, x = np.mgrid[:700, :1000]
    image = np.stack([120 + 60 * np.sin(x / 40), 100 + 50 * np.cos(y / 30), 90 + x // 10], axis=-1).astype(np.uint8)
    rows = ["bag_id,file,label,split"]
    for number, split in enumerate(["train", "train", "val", "val", "test", "test"]):
        with tifffile.TiffWriter(folder / f"{number}.tiff") as file:
            for level in range(2 if number == 0 else 1):
                pixels = np.array(Image.fromarray(image).resize((1000 >> level, 700 >> level), Image.Resampling.BOX))
                file.write(
                    pixels, photometric="rgb", tile=(128, 128), subfiletype=int(level > 0),
                    resolution=(10000 * 2**-level / 0.5, 10000 * 2**-level / 0.5), resolutionunit="CENTIMETER",
                )  # fmt: skip
        rows.append(f"s{number},{number}.tiff,{number % 2},{split}")
    (folder / "slides.csv").write_text("\n".join(rows))
    settings = SlideSettings(mpp=1.0, tile_size=32, min_saturation=0)
    pack_slides(read_slide_manifest(folder / "slides.csv"), folder / "cohort", settings, workers=1)
    (folder / "1.tiff").unlink()
    return write_run(folder / "run", folder / "cohort")


def part_of(canvas, whole, from_whole, left, top, width, height, out):
    """What a tile must show: what the canvas reads there, or the mean of its finest pixels."""
    if not from_whole:
        return canvas.read(left, top, width, height, out)
    return whole.resize(out, Image.Resampling.BOX, box=(left, top, left + width, top + height))


def check_tiles(client, viewer, number, *, coarse_from):
    """Every tile of every level shows what the canvas shows there, and the tiles of a level cover it."""
    description = client.get(f"/api/bags/{number}/dzi").json()["Image"]
    size = description["Size"]["Width"], description["Size"]["Height"]
    assert (description["TileSize"], description["Overlap"], description["Format"]) == (TILE, OVERLAP, "jpg")
    zoom = DeepZoom(size)
    with open_canvas(viewer.shown.run.cohort.tile_file(viewer.table.bag_id[number])) as canvas:
        assert canvas.size == size
        whole = canvas.read(0, 0, *size, size)
        for level in range(zoom.levels):
            factor = 2 ** (zoom.levels - 1 - level)
            across, down = (math.ceil(math.ceil(length / factor) / TILE) for length in size)
            for column, row in ((column, row) for column in range(across) for row in range(down)):
                answer = client.get(f"/{description['Url']}{level}/{column}_{row}.jpg")
                assert answer.status_code == 200
                left, top = (max(place * TILE - OVERLAP, 0) * factor for place in (column, row))
                with Image.open(io.BytesIO(answer.content)) as found:
                    width, height = (
                        min(pixels * factor, length - start)
                        for pixels, length, start in zip(found.size, size, (left, top), strict=True)
                    )
                    expected = part_of(canvas, whole, factor >= coarse_from, left, top, width, height, found.size)
                    difference = np.abs(np.asarray(found, int) - np.asarray(expected, int))
                assert difference.mean() < 3
            for beyond in (f"{across}_0", f"0_{down}", "-1_0"):
                assert client.get(f"/{description['Url']}{level}/{beyond}.jpg").status_code == 404
    assert client.get(f"/{description['Url']}{zoom.levels}/0_0.jpg").status_code == 404


@pytest.mark.parametrize(("number", "coarse_from"), [(0, 1024), (1, 2), (2, 1024)], ids=["pyramid", "tiles", "flat"])
def test_deep_zoom_tiles_are_the_canvas(slides, number, coarse_from):
    client, viewer = client_of(slides)
    assert client.get(f"/api/bags/{number}").json()["is_slide"] == (number != 1)
    check_tiles(client, viewer, number, coarse_from=coarse_from)
    viewer.close()


@pytest.mark.parametrize("number", [1, 2], ids=["tiles", "flat"])
def test_coarse_tiles_come_from_one_overview(slides, number, monkeypatch):
    monkeypatch.setattr(deep_zoom, "_LARGEST_READ", 300)
    monkeypatch.setattr(deep_zoom, "_OVERVIEW_SIDE", 256)
    client, viewer = client_of(slides)
    with viewer.pictures.open(number) as picture:
        assert picture._overview.size == ((500, 350) if number == 2 else (480, 320))
    check_tiles(client, viewer, number, coarse_from=2)
    viewer.close()


def test_few_pictures_stay_open_and_none_closes_in_use(slides):
    _, viewer = client_of(slides)
    with viewer.pictures.open(0) as picture:
        for number in range(1, 6):
            assert viewer.pictures.jpeg(number, 9, 0, 0)
        assert len(viewer.pictures._opened) == deep_zoom.OPEN_PICTURES
        assert picture.tile(9, 1, 1) is not None
    viewer.close()
    assert not viewer.pictures._opened


def test_a_picture_is_not_sent_twice(hostile, slides):
    first = hostile.get("/api/bags/1/tiles/5/0_0.jpg")
    again = hostile.get("/api/bags/1/tiles/5/0_0.jpg", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    # the same address of another bag or run is another picture
    other = hostile.get("/api/bags/2/tiles/5/0_0.jpg", headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200
    client, viewer = client_of(slides)
    assert client.get("/api/bags/1/tiles/5/0_0.jpg").headers["etag"] != first.headers["etag"]
    assert "no-cache" in first.headers["cache-control"]
    viewer.close()


def test_lists_are_searched_sorted_and_filtered(hostile, hostile_run):
    table = pd.read_csv(hostile_run / "bag_predictions.csv", keep_default_na=False)

    def ask(**parameters):
        found = hostile.get("/api/bags", params=parameters).json()
        assert found["total"] == len(found["rows"])
        return found["rows"]

    own = table[(table["encoder"] == "refined") & (table["aggregator"] == "max")].reset_index(drop=True)
    by_score = own.sort_values("probability", ascending=False)["bag_id"].tolist()
    assert [row["bag_id"] for row in ask(model="refined+max", sort="score", descending=True)] == by_score
    wrong = own[(own["probability"] >= 0.7) != (own["label"] == 1)]["bag_id"].tolist()
    assert 0 < len(wrong) < len(own)
    assert {row["bag_id"] for row in ask(model="refined+max", errors=True)} == set(wrong)
    assert {row["bag_id"] for row in ask(model="refined+max") if row["error"]} == set(wrong)
    distance = [abs(row["probability"] - row["label"]) for row in ask(sort="error", descending=True)]
    assert distance == sorted(distance, reverse=True)
    spread = table.groupby("bag_id")["probability"].agg(np.ptp)
    assert [row["bag_id"] for row in ask(sort="disagreement")] == spread.sort_values().index.tolist()
    assert {row["split"] for row in ask(split="val")} == {"val"}
    assert [row["split"] for row in ask(sort="split")] == sorted(row["split"] for row in ask())
    assert [row["label"] for row in ask(sort="label")] == sorted(row["label"] for row in ask())
    assert [row["bag_id"] for row in ask(query="BAG 3")] == ["bag 3"]
    assert ask(query="no such bag") == []
    for parameters in ({"sort": "x"}, {"split": "x"}, {"page": -1}, {"page": "x"}):
        assert hostile.get("/api/bags", params=parameters).status_code == 422
    assert hostile.get("/api/bags", params={"model": "x"}).status_code == 404
    assert hostile.get("/api/bags?model=refined+max&sort=score&descending=1").json()["rows"][0]["bag_id"] == by_score[0]


def test_hostile_names_are_only_names(hostile):
    rows = hostile.get("/api/bags").json()["rows"]
    assert {row["bag_id"] for row in rows} >= set(HOSTILE)
    for row in rows:
        bag = hostile.get(f"/api/bags/{row['n']}").json()
        assert bag["bag_id"] == row["bag_id"]
        assert bag["group"] == f"group of {row['bag_id']}"
        assert hostile.get(f"/api/bags/{row['n']}/instances/0").json()["name"] == f"{row['bag_id']} tile 0"
        assert len(hostile.get(f"/api/bags/{row['n']}/instances/0/neighbours").json()["within"]["found"]) == 8
        found = hostile.get("/api/bags", params={"query": row["bag_id"]}).json()["rows"]
        assert row["bag_id"] in {one["bag_id"] for one in found}
        for path in (row["bag_id"], quote(row["bag_id"], safe="")):
            assert hostile.get(f"/api/bags/{path}").status_code == 404
    for answer in (hostile.get("/api/bags"), hostile.get("/api/bags/0")):
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd", "/config.yaml", "/api", "/api/", "/api/bags/..%2f..%2fetc%2fpasswd",
        "/api/bags/../../etc/passwd", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/../service.py",
        "/static//etc/passwd", "/static/", "/static", "/static/..%5capp.py", "/static/%00", "/api/bags/-1",
        "/api/bags/14", "/api/bags/1.5", "/api/bags/0x1", "/api/bags/" + "9" * 5000, "/api/bags/0/instances/9",
        "/api/bags/0/instances/-1", "/api/bags/0/instances/9/image", "/api/bags/0/instances/99/neighbours",
        "/api/bags/0/tiles/99/0_0.jpg", "/api/bags/0/tiles/..%2f/0_0.jpg", "/api/bags/0/tiles/0/0_0.png",
        "/api/bags/0/files/results.json", "/docs", "/redoc", "/openapi.json", "/run",
    ],
)  # fmt: skip
def test_what_is_not_of_the_run_is_not_there(hostile, path):
    answer = hostile.get(path, follow_redirects=True)
    assert answer.status_code == 404, answer.text
    assert "root:" not in answer.text
    assert "import" not in answer.text


def test_every_answer_keeps_the_page_in_bounds(hostile):
    for path in ("/", "/static/app.js", "/static/style.css", "/api/run", "/api/bags/0/tiles/0/0_0.jpg", "/nothing"):
        headers = hostile.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
    assert hostile.post("/api/run").status_code == 405


def test_the_page_loads_nothing_from_elsewhere():
    from its2clr.viewer.app import STATIC

    page = (STATIC / "index.html").read_text()
    assert "http" not in page
    assert "<script>" not in page
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text
        assert "http://www.w3.org/2000/svg" in text or "http" not in text.replace("HTTP", "")
    assert (STATIC / "openseadragon" / "LICENSE.txt").is_file()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200), ("localhost:8000", 200), ("127.0.0.1:9", 200), ("[::1]:8000", 200), ("LOCALHOST", 200),
        ("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403), ("192.168.0.7", 403),
        ("127.0.0.1.evil.example", 403), ("", 403), ("[::1].evil.example", 403),
    ],
)  # fmt: skip
def test_other_sites_cannot_reach_in_by_name(hostile, host, expected):
    for path in ("/api/run", "/", "/static/app.js"):
        assert hostile.get(path, headers={"Host": host}).status_code == expected


@pytest.fixture
def open_to_all(hostile_run):
    viewer = Viewer(hostile_run)
    app = Guard(create_app(viewer), token="s3cret; ключ", local=False, name="-8000")
    yield TestClient(app, base_url="http://lab.example:8000")
    viewer.close()


def test_without_the_token_nothing_is_given(open_to_all):
    paths = ["/", "/static/app.js", "/api/run", "/api/bags/0", "/api/bags/0/tiles/0/0_0.jpg", "/nothing", "/etc/passwd"]
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"},
                        {"Cookie": "its2clr-view-8000=s3cret"}, {"Cookie": "its2clr-view-8000"}):  # fmt: skip
            answer = open_to_all.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "set-cookie" not in answer.headers
        assert open_to_all.get(path, params={"token": ""}).status_code == 401
        assert open_to_all.get(path, params={"token": "s3cret"}).status_code == 401


def test_the_token_opens_by_address_once_then_by_cookie(open_to_all):
    answer = open_to_all.get("/", params={"token": "s3cret; ключ"})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "s3cret" not in cookie
    assert open_to_all.get("/api/run").status_code == 200
    assert open_to_all.get("/nothing").status_code == 404
    open_to_all.cookies.clear()
    assert open_to_all.get("/api/run").status_code == 401
    bearer = {"Authorization": "Bearer s3cret; ключ".encode()}
    assert open_to_all.get("/api/run", headers=bearer).status_code == 200


def test_a_code_opens_once(hostile_run):
    viewer = Viewer(hostile_run)
    app = Guard(create_app(viewer), token="k", local=True)
    code = app.one_time_code()
    browser, other = (TestClient(app, base_url="http://localhost:8000") for _ in range(2))
    assert browser.get("/", params={"once": "guess"}).status_code == 401
    assert browser.get("/", params={"once": code}).status_code == 200
    assert browser.get("/api/run").status_code == 200
    assert other.get("/", params={"once": code}).status_code == 401
    viewer.close()


def test_ten_thousand_bags_are_quick(tmp_path):
    run = write_run(tmp_path / "run", write_large_cohort(tmp_path / "cohort", 10_000), features=False)
    client, viewer = client_of(run)
    everything = [
        row["n"]
        for page in range(100)
        for row in client.get("/api/bags", params={"page": page, "sort": "score"}).json()["rows"]
    ]
    assert sorted(everything) == list(range(10_000))
    assert client.get("/api/bags", params={"page": 100}).json()["rows"] == []
    started = time.perf_counter()
    for sort in ("bag", "score", "label", "split", "error", "disagreement"):
        found = client.get("/api/bags", params={"sort": sort, "query": "99", "descending": True}).json()
        assert found["total"] == sum("99" in bag_id for bag_id in viewer.table.bag_id)
    assert time.perf_counter() - started < 3
    assert len(client.get("/api/bags").content) < 50_000


def test_damage_is_told(tmp_path):
    run = write_run(tmp_path / "run", write_cohort(tmp_path / "cohort", [f"b{n}" for n in range(6)]))
    client, viewer = client_of(run)
    path = viewer.shown.run.cohort.tile_file("b0").path
    path.write_bytes(path.read_bytes()[:200])
    answer = client.get("/api/bags/0")
    assert answer.status_code == 500
    assert "b0.h5" in answer.json()["detail"]
    assert client.get("/api/bags/1").status_code == 200
    (run / "rounds" / "000" / "pseudo_labels.parquet").unlink()
    assert Viewer(run).rounds.epochs == list(EPOCHS[1:])


def test_a_run_that_cannot_be_shown_is_refused(evaluated_run, tmp_path):
    (tmp_path / "config.yaml").write_text((evaluated_run / "config.yaml").read_text())
    with pytest.raises(InputError, match="not evaluated yet"):
        Viewer(tmp_path)


def test_stored_tiles_are_sent_as_they_are(hostile, hostile_run):
    tiles = RunScores(hostile_run).cohort.tile_file(HOSTILE[0])
    answer = hostile.get("/api/bags/0/instances/4/image")
    np.testing.assert_array_equal(decode(answer.content), decode(tiles.encoded(4)))
    again = hostile.get("/api/bags/0/instances/4/image", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
