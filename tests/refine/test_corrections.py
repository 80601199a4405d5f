import json

import numpy as np
import pandas as pd
import pytest
import shapely
from typer.testing import CliRunner

from its2clr.cli import app
from its2clr.cohort import Cohort
from its2clr.errors import InputError
from its2clr.refine.corrections import read_corrections, trusted_instances
from its2clr.refine.labels import CorrectedLabels, InstanceLabels
from its2clr.refine.pseudo_labels import partition
from its2clr.run.opening import open_corrected
from its2clr.run.scores import RunScores

NAMES = {1: "Confirmed positive", 0: "Confirmed negative"}


def squares(places, side, name):
    return [
        {
            "type": "Feature",
            "properties": {"objectType": "tile", "classification": {"name": name}},
            "geometry": json.loads(shapely.to_geojson(shapely.box(x, y, x + side, y + side))),
        }
        for x, y in places
    ]


def write(folder, bag_id, *features):
    folder.mkdir(exist_ok=True)
    collection = {"type": "FeatureCollection", "features": [one for some in features for one in some]}
    (folder / f"{bag_id}.geojson").write_text(json.dumps(collection))


@pytest.fixture(scope="module")
def train(tiny_cohort):
    return Cohort.open(tiny_cohort).split("train")


def bag_of(train, label, number=0):
    row = train.bags[train.bags["label"] == label].index[number]
    bag_id = train.bags["bag_id"][row]
    return bag_id, train.tile_file(bag_id), int(train.offsets()[row])


def test_marked_tiles_are_trusted(train, tmp_path):
    bag_id, tiles, first = bag_of(train, 1)
    side = tiles.tile_size_level0
    write(
        tmp_path, bag_id,
        squares(tiles.coords[[0, 3]].tolist(), side, "confirmed POSITIVE"),
        squares(tiles.coords[[1]].tolist(), side, "Confirmed negative"),
        squares(tiles.coords[[2]].tolist(), side, "Positive"),  # what the model said, nobody confirmed it
        squares([(tiles.coords[4] + 0.6 * side).tolist()], side, "Confirmed positive"),  # sixteen percent of tile 4
    )  # fmt: skip
    said = []
    trusted = read_corrections(tmp_path, train, said.append)
    expected = np.full(train.n_instances, -1)
    expected[[first, first + 3]], expected[first + 1] = 1, 0
    marked = np.flatnonzero(trusted != -1)
    assert set(np.flatnonzero(expected != -1)) <= set(marked)
    assert (trusted[expected != -1] == expected[expected != -1]).all()
    assert trusted[first + 2] == trusted[first + 4] == -1
    assert "in 1 training bags" in said[0]


def test_a_run_goes_on_with_what_it_began_with(train, tmp_path):
    bag_id, tiles, first = bag_of(train, 1)
    folder, run = tmp_path / "marks", tmp_path / "run"
    run.mkdir()
    write(folder, bag_id, squares(tiles.coords[[5]].tolist(), tiles.tile_size_level0, "Confirmed positive"))
    began = trusted_instances(folder, train, run, lambda _: None)
    assert began[first + 5] == 1
    assert (began >= 0).sum() == 1
    write(folder, bag_id, squares(tiles.coords[[6]].tolist(), tiles.tile_size_level0, "Confirmed positive"))
    np.testing.assert_array_equal(trusted_instances(folder, train, run, lambda _: None), began)


def test_contradictions_are_said(train, tmp_path):
    bag_id, tiles, _ = bag_of(train, 0)
    place, side = tiles.coords[[0]].tolist(), tiles.tile_size_level0
    write(tmp_path / "a", bag_id, squares(place, side, "Confirmed positive"))
    with pytest.raises(InputError, match="labelled negative"):
        read_corrections(tmp_path / "a", train, lambda _: None)
    write(
        tmp_path / "b", bag_id, squares(place, side, "Confirmed positive"), squares(place, side, "Confirmed negative")
    )
    with pytest.raises(InputError, match="marked as both"):
        read_corrections(tmp_path / "b", train, lambda _: None)
    write(tmp_path / "c", "someone-else", squares(place, side, "Confirmed negative"))
    with pytest.raises(InputError, match=r"no GeoJSON file named like a training bag.*someone-else.geojson"):
        read_corrections(tmp_path / "c", train, lambda _: None)
    write(tmp_path / "e", bag_id, squares(place, side, "Confirm negative"))
    with pytest.raises(InputError, match="nothing is marked in the 1 files"):
        read_corrections(tmp_path / "e", train, lambda _: None)
    with pytest.raises(InputError, match="is not a folder"):
        read_corrections(tmp_path / "d", train, lambda _: None)


def test_corrections_of_test_bags_are_not_used(train, tiny_cohort, tmp_path):
    other = Cohort.open(tiny_cohort).split("test").bags["bag_id"].iloc[0]
    bag_id, tiles, _ = bag_of(train, 1)
    marks = squares(tiles.coords[[0]].tolist(), tiles.tile_size_level0, "Confirmed negative")
    write(tmp_path, bag_id, marks)
    write(tmp_path, other, marks)
    said = []
    assert (read_corrections(tmp_path, train, said.append) >= 0).sum() == 1
    assert f"not used, as not named like a training bag: {other}.geojson" in said[0]


@pytest.mark.parametrize("ratio", [0.2, 1.0])
@pytest.mark.parametrize("seed", range(50))
def test_trusted_instances_are_always_used_and_nothing_else_moves(seed, ratio):
    generator = np.random.default_rng(seed)
    bags = np.repeat(np.arange(6), 5)
    labels = np.array([0, 0, 1, 1, 1, 1])[bags]
    scores = generator.random(30).astype(np.float32)
    trusted = np.where(labels == 1, generator.choice([-1, -1, 0, 1], 30), generator.choice([-1, 0], 30)).astype(np.int8)
    source = CorrectedLabels(trusted, iterative=True)
    known = source.labels(InstanceLabels(scores, 0.5), None)
    assert (known.probabilities == np.where(trusted < 0, scores, trusted)).all()
    pools = source.pools(partition(known.probabilities, labels, known.threshold, ratio, bags, top_instance=True))
    assert set(np.flatnonzero(trusted == 1)) <= set(pools.pseudo_positive)
    assert set(np.flatnonzero(trusted == 0)) <= set(pools.negative_bag)
    assert not set(np.flatnonzero(trusted == 0)) & {*pools.pseudo_positive, *pools.pseudo_negative}
    assert not set(np.flatnonzero(trusted == 1)) & {*pools.negative_bag, *pools.pseudo_negative}
    rows = np.concatenate(pools)
    assert len(set(rows)) == len(rows)
    for bag in range(2, 6):  # a positive bag still holds a positive, unless all of it is known to be negative
        of_bag = np.flatnonzero(bags == bag)
        if ratio == 1 and not (trusted[of_bag] == 0).all():
            assert set(of_bag) & set(pools.pseudo_positive)


def test_a_run_is_refined_again_with_corrections(evaluated_run, tmp_path):
    scores = RunScores(evaluated_run)
    train = scores.cohort.split("train")
    for number in range(2):
        bag_id, tiles, _ = bag_of(train, 1, number)
        places, truth = tiles.coords, tiles.labels
        marks = [
            squares(places[truth == value].tolist(), tiles.tile_size_level0, name) for value, name in NAMES.items()
        ]
        write(tmp_path / "marks", bag_id, *marks)
    out = tmp_path / "corrected"
    command = ["correct", str(evaluated_run), str(tmp_path / "marks"), "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "Refined before" in result.output
    table = pd.read_parquet(out / "rounds" / "000" / "pseudo_labels.parquet")
    known = table[table["trusted"] >= 0]
    assert len(known) == 2 * 16
    assert (known["pseudo_label"] == known["trusted"]).all()
    assert (known.loc[known["trusted"] == 1, "selected"] == 1).all()
    assert not (known.loc[known["trusted"] == 0, "selected"] == 1).any()
    report = (out / "report.html").read_text()
    assert "A person marked" in report
    assert "Refined before + dsmil" in report
    assert "SimCLR + dsmil" not in report
    wrong = CliRunner().invoke(app, [*command[:2], str(tmp_path / "nowhere"), "--out", str(tmp_path / "other")])
    assert isinstance(wrong.exception, InputError)
    assert not (tmp_path / "other" / "checkpoints").exists()  # before anything is trained
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert "refine: already done" in again.output
    with pytest.raises(InputError, match="a run of their own"):
        open_corrected(evaluated_run, tmp_path / "marks", evaluated_run)
