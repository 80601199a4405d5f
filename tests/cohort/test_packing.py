"""The one driver that makes cohorts, with bags of a kind that exists only here: so many grey tiles each."""

import csv
import errno
import hashlib
import io
import os
from functools import partial

import pandas as pd
import pytest
from PIL import Image
from tests.test_files import killed_while_writing

from its2clr.cohort import Cohort, CohortInfo, LeftOut, tile_path
from its2clr.cohort.manifest import BagTable
from its2clr.cohort.packing import (
    FINGERPRINT,
    BagResult,
    NoBagLeftError,
    SplitPlan,
    file_stamp,
    fingerprint,
    pack_cohort,
    path_to_write,
    whole_tile_file,
)
from its2clr.cohort.tiles import write_tile_file
from its2clr.errors import DiskFullError, InputError

FRACTIONS = (0.4, 0.3, 0.3)


def grey(bag_id, count, out):
    """Pack a bag of `count` tiles; without any it is left out."""
    if not count:
        return BagResult(left_out=(LeftOut(bag_id, "", 0, "is empty"),))
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (90, 90, 90)).save(buffer, "PNG")
    write_tile_file(
        path_to_write(out, bag_id),
        [buffer.getvalue()] * count,
        [[4 * number, 0] for number in range(count)],
        [str(number) for number in range(count)],
        bag_id=bag_id,
        tile_size=4,
        tile_size_level0=4,
        mpp=1.0,
        source="nowhere",
        encoding="png",
        attributes={FINGERPRINT: fingerprint(bag_id, count)},
    )
    return BagResult(count, notes=(f"{count} tiles",))


class Greys:
    """Six bags, two of each split, one of each class; `counts` says how many tiles they have."""

    def __init__(self, out, labelled=True):
        self.out = out
        self.counts = {f"{split}{label}": 2 + label for split in ("train", "val", "test") for label in (0, 1)}
        self.labelled = labelled
        self.packed, self.progress = [], []

    @property
    def table(self):
        names = list(self.counts)
        labels = {"label": [int(name[-1]) for name in names]} if self.labelled else {}
        splits = [name[:-1] for name in names] if self.labelled else "test"
        bags = pd.DataFrame(
            {"bag_id": names, **labels, "split": splits, "group": names}, index=range(2, 2 + len(names))
        )
        return BagTable(self.out.parent / "bags.csv", bags, has_splits=True, labelled=self.labelled)

    def finished(self, item):
        tiles = whole_tile_file(self.out, item[0], fingerprint(*item))
        return None if tiles is None else BagResult(len(tiles))

    def pack(self, item):
        self.packed.append(item[0])
        return grey(*item, self.out)

    def make(self, **more):
        table = self.table
        info = CohortInfo(tile_size=4, encoding="png", labelled=self.labelled, settings={"colour": "grey"})
        return pack_cohort(
            self.out,
            info,
            table.bags,
            {name: (name, count) for name, count in self.counts.items()},
            **{
                "finished": self.finished,
                "pack": self.pack,
                "splits": SplitPlan(table, FRACTIONS, 0),
                "progress": lambda *done: self.progress.append(done),
                "workers": 1,
                **more,
            },
        )


@pytest.fixture
def greys(tmp_path):
    return Greys(tmp_path / "out")


def problems_of(out):
    with (out / "problems.csv").open(newline="") as file:
        return [row["bag_id"] for row in csv.DictReader(file)]


def test_a_cohort_is_made_and_opened(greys):
    packed = greys.make()
    cohort = Cohort.open(greys.out)
    assert cohort.bags["bag_id"].tolist() == list(greys.counts)
    assert cohort.bags["n_instances"].tolist() == list(greys.counts.values())
    summary = packed.summary
    assert (summary.n_bags, summary.n_instances, summary.n_packed, summary.n_skipped) == (6, 15, 6, 0)
    assert (summary.path, summary.left_out) == (greys.out, ())
    assert {name: result.notes for name, result in packed.results.items()} == {
        name: (f"{count} tiles",) for name, count in greys.counts.items()
    }
    assert greys.progress == [(done, 6) for done in range(1, 7)]
    assert problems_of(greys.out) == []


def test_what_is_whole_is_kept_and_only_the_rest_is_packed(greys):
    greys.make()
    greys.packed, greys.progress, greys.counts["val1"] = [], [], 7
    tile_path(greys.out, "test0").write_bytes(b"half a file")
    tile_path(greys.out, "train0").unlink()
    summary = greys.make().summary
    assert greys.packed == ["train0", "val1", "test0"]
    assert (summary.n_packed, summary.n_skipped, summary.n_instances) == (3, 3, 19)
    assert greys.progress == [(3, 6), (4, 6), (5, 6), (6, 6)]


def test_a_full_disk_leaves_what_is_whole_and_the_same_call_goes_on(greys, monkeypatch):
    def write(number, content, place):
        if len(list(greys.out.glob("tiles/*.h5"))) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(number, content, place)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(DiskFullError, match=r"tiles: no space left .*val0\.h5"):
        greys.make()
    monkeypatch.undo()
    assert sorted(path.name for path in (greys.out / "tiles").iterdir()) == ["train0.h5", "train1.h5"]
    left = killed_while_writing(tile_path(greys.out, "val0"))  # and then a process was killed, too
    greys.packed = []
    assert greys.make().summary.n_skipped == 2
    assert greys.packed == ["val0", "val1", "test0", "test1"]
    assert not left.exists()


def test_the_work_is_given_to_whoever_does_it_and_comes_back_in_any_order(greys):
    given = []

    def backwards(pack, items):
        given.append(list(items))
        return [(name, pack(items[name])) for name in reversed(items)]

    assert list(greys.make(spread=backwards).results) == list(greys.counts)
    assert Cohort.open(greys.out).bags["bag_id"].tolist() == list(greys.counts)
    greys.make(spread=backwards)
    assert given == [list(greys.counts)]  # a cluster is not even asked for if there is nothing to do


def test_bags_without_instances_are_left_out_with_all_that_was_there_of_them(greys):
    greys.counts["more0"] = 1
    table = greys.table
    table.bags.loc[8, "split"] = "train"
    plan = SplitPlan(table, FRACTIONS, 0)
    items = {name: (name, count) for name, count in greys.counts.items()}
    info = CohortInfo(tile_size=4, encoding="png")
    make = partial(pack_cohort, greys.out, info, table.bags, finished=greys.finished, pack=greys.pack, splits=plan)
    assert make(items).summary.n_bags == 7
    summary = make({**items, "more0": ("more0", 0)}).summary
    assert [one.bag_id for one in summary.left_out] == problems_of(greys.out) == ["more0"]
    assert (summary.n_bags, summary.n_packed, summary.n_skipped) == (6, 0, 6)
    assert not tile_path(greys.out, "more0").exists()
    assert "more0" not in Cohort.open(greys.out).bags["bag_id"].tolist()
    before = (greys.out / "bags.csv").stat().st_mtime_ns
    make({**items, "more0": ("more0", 0)})
    assert (greys.out / "bags.csv").stat().st_mtime_ns == before  # tried again in vain: the cohort stays complete


def test_problems_are_listed_in_the_order_of_the_table(greys):
    def pack(item):
        images = (LeftOut(item[0], "a.png", 900, "broken"), LeftOut(item[0], "b.png", 1, "broken"))
        return BagResult(1, images if item[0] in ("train1", "test1") else ())

    before = [LeftOut("gone", "", 3, "has no file"), LeftOut("unlabelled", "", 99, "has no label")]
    summary = greys.make(pack=pack, left_out=before[::-1]).summary
    assert problems_of(greys.out) == ["gone", "train1", "train1", "test1", "test1", "unlabelled"]
    assert [one.file for one in summary.left_out] == ["", "a.png", "b.png", "a.png", "b.png", ""]


def test_a_table_that_knows_its_instances_is_written_as_it_is(greys):
    bags = greys.table.bags.assign(n_instances=5)
    info = CohortInfo(tile_size=4, encoding="png")
    summary = pack_cohort(greys.out, info, bags, {}, finished=lambda _: None, pack=greys.pack).summary
    assert (summary.n_bags, summary.n_instances) == (6, 30)


def test_a_folder_with_other_content_or_settings_is_refused(greys):
    greys.out.mkdir()
    (greys.out / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"holds other files \(thesis\.tex\)"):
        greys.make()
    assert greys.packed == []


def test_a_folder_in_work_does_not_look_complete(greys):
    greys.make()
    greys.counts["test1"] = 9

    def stop(item):
        path_to_write(greys.out, item[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        greys.make(pack=stop)
    with pytest.raises(InputError, match="the cohort is incomplete"):
        Cohort.open(greys.out)


def test_a_split_that_loses_a_class_leaves_no_complete_cohort(greys):
    greys.make()
    greys.counts["val1"] = 0
    with pytest.raises(InputError, match=r"after leaving out 1 bags.*split 'val' has no bag with label 1"):
        greys.make()
    assert problems_of(greys.out) == ["val1"]
    assert not (greys.out / "bags.csv").exists()


def test_of_bags_to_be_predicted_one_is_enough_but_none_is_an_error_of_its_own(tmp_path):
    greys = Greys(tmp_path / "out", labelled=False)
    greys.counts = {"a": 0, "b": 2}
    assert greys.make().summary.n_bags == 1
    assert Cohort.open(greys.out).bags["split"].tolist() == ["test"]
    greys.counts = {"a": 0, "b": 0}
    with pytest.raises(NoBagLeftError, match="no bag is left"):
        greys.make()


def test_where_splits_come_from(greys):
    table = greys.table
    assert SplitPlan(table, FRACTIONS, 7).settings() == {"splits": "manifest"}
    assert SplitPlan(Greys(greys.out, labelled=False).table, FRACTIONS, 7).settings() == {"splits": "all test"}
    free = BagTable(table.path, table.bags.assign(split=""), has_splits=False, labelled=True)
    plan = SplitPlan(free, FRACTIONS, 7)
    assert plan.settings() == {"splits": "assigned", "seed": 7, "fractions": [0.4, 0.3, 0.3]}
    assert sorted(plan.settle(free.bags, greys.out)["split"]) == ["test", "test", "train", "train", "val", "val"]
    with pytest.raises(InputError, match=r"after leaving out 1 bags that cannot be used.*cannot each get bags of both"):
        plan.settle(free.bags[1:], greys.out)
    many = pd.concat([free.bags] * 10, ignore_index=True).assign(group=[str(number) for number in range(60)])
    counts = SplitPlan(BagTable(table.path, many, has_splits=False, labelled=True), (0.5, 0.3, 0.2), 7)
    assert counts.settle(many, greys.out)["split"].value_counts().to_dict() == {"train": 30, "val": 18, "test": 12}
    one_class = BagTable(table.path, free.bags.assign(label=1), has_splits=False, labelled=True)
    with pytest.raises(InputError, match="cannot each get bags of both classes"):
        SplitPlan(one_class, FRACTIONS, 7).settings()  # before anything is packed


def test_a_tile_file_counts_as_whole_only_with_its_fingerprint(tmp_path):
    grey("a", 3, tmp_path)
    assert len(whole_tile_file(tmp_path, "a", fingerprint("a", 3))) == 3
    assert whole_tile_file(tmp_path, "a", fingerprint("a", 4)) is None
    assert whole_tile_file(tmp_path, "b", fingerprint("b", 3)) is None
    content = tile_path(tmp_path, "a").read_bytes()
    tile_path(tmp_path, "a").write_bytes(content[: len(content) // 2])
    assert whole_tile_file(tmp_path, "a", fingerprint("a", 3)) is None


def test_fingerprints_of_cohorts_on_disk_stay_what_they_are(tmp_path):
    """Tile files hold them: another hash would have every cohort packed again."""
    content = b'[{"tile_size": 4}, "a", [1, 2], null]'
    assert fingerprint({"tile_size": 4}, "a", (1, 2), None) == hashlib.sha256(content).hexdigest()
    (tmp_path / "a").write_bytes(b"12345")
    assert file_stamp(tmp_path / "a") == (5, (tmp_path / "a").stat().st_mtime_ns)
    assert file_stamp(tmp_path / "b") == (-1, -1)
