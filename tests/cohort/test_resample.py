"""Resampled cohorts keep their labels true: properties over many random bags, and whole folders."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest

from its2clr.cohort import Cohort, examine, pack_images, read_manifest, read_tiles, tile_path, write_bags
from its2clr.cohort.resample import ResampleSummary, resample_cohort
from its2clr.cohort.subsets import resample_witness_rate, split_into_sub_bags, witness_rate
from its2clr.errors import InputError

TILE_SIZE = 16


def random_bags(seed, count=60, largest=120):
    """Labels of the instances of many bags, with many or few positives, down to bags of a single instance."""
    rng = np.random.default_rng(seed)
    bags = []
    for _ in range(count):
        label, size = int(rng.integers(2)), int(rng.integers(1, largest + 1))
        labels = (rng.random(size) < rng.choice([0.02, 0.2, 0.8])).astype(int) * label
        if label:
            labels[rng.integers(size)] = 1
        bags.append((label, labels.tolist()))
    return bags


def flatten(bags):
    offsets = [0]
    for _, labels in bags:
        offsets.append(offsets[-1] + len(labels))
    return [one for _, labels in bags for one in labels], [label for label, _ in bags], offsets


def kept_of_each_bag(bags, kept):
    """Positions within each bag, by plain loops."""
    kept, start, parts = set(kept.tolist()), 0, []
    for _, labels in bags:
        parts.append([k for k in range(len(labels)) if start + k in kept])
        start += len(labels)
    return parts


def plain_witness_rate(bags):
    positives = instances = 0
    for label, labels in bags:
        if label == 1:
            positives += labels.count(1)
            instances += len(labels)
    return positives / instances


def thinned(bags, **settings):
    parts = kept_of_each_bag(bags, resample_witness_rate(*flatten(bags), **settings))
    return [(label, [labels[k] for k in part]) for (label, labels), part in zip(bags, parts, strict=True)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("negative_bags", [False, True])
@pytest.mark.parametrize("keep", [(1, 1), (0.4, 1), (0.05, 1), (0, 1), (1, 0.5), (1, 0.33), (1, 0), (0.3, 0.6), (0, 0)])
def test_bags_stay_true_and_keep_their_share(keep, negative_bags, seed):
    keep_negatives, keep_positives = keep
    bags = random_bags(seed)
    settings = {"keep_negatives": keep_negatives, "keep_positives": keep_positives, "negative_bags": negative_bags}
    for (label, before), (_, after) in zip(bags, thinned(bags, seed=seed, **settings), strict=True):
        assert after, "a bag became empty"
        assert max(after) == label
        wanted = keep_positives * before.count(1)
        assert after.count(1) in {max(label, math.floor(wanted)), max(label, math.ceil(wanted))}
        wanted = before.count(0) * (keep_negatives if label or negative_bags else 1)
        assert after.count(0) in {max(1 - label, math.floor(wanted)), max(1 - label, math.ceil(wanted))}


@pytest.mark.parametrize("seed", range(10))
def test_kept_indices_rise_and_are_of_the_cohort(seed):
    bags = random_bags(seed)
    kept = resample_witness_rate(*flatten(bags), keep_negatives=0.5, keep_positives=0.5, seed=seed)
    assert (np.diff(kept) > 0).all()
    assert kept[0] >= 0
    assert kept[-1] < flatten(bags)[2][-1]


@pytest.mark.parametrize("keep", [(0.05, 1), (0.1, 1), (0.4, 1), (1, 0.5), (1, 0.33)])
def test_rates_of_the_paper_are_reached(keep):
    """Original witness rate 10.9%, as in tab:WR_exp; small bags, where most shares are no whole number."""
    rng = np.random.default_rng(0)
    bags = []
    for _ in range(400):
        size = int(rng.integers(60, 90))
        positives = max(4, round(0.109 * size + rng.normal()))
        bags.append((1, [1] * positives + [0] * (size - positives)))
    before = plain_witness_rate(bags)
    keep_negatives, keep_positives = keep
    aimed = before * keep_positives / (before * keep_positives + (1 - before) * keep_negatives)
    reached = plain_witness_rate(thinned(bags, keep_negatives=keep_negatives, keep_positives=keep_positives))
    assert reached == pytest.approx(aimed, rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_witness_rate_equals_plain_loops(seed):
    bags = random_bags(seed)
    assert witness_rate(*flatten(bags)) == pytest.approx(plain_witness_rate(bags))


def test_witness_rate_leaves_out_unknown_instances_and_needs_a_positive_bag():
    assert witness_rate([1, -1, 0, 0, 0, -1], [1, 0], [0, 4, 6]) == pytest.approx(1 / 3)
    with pytest.raises(InputError, match="no positive bag has labelled instances"):
        witness_rate([0, 0], [0], [0, 2])


def test_choice_depends_on_seed_and_bag_id_not_on_order():
    bags = [bag for bag in random_bags(3) if bag[0] == 1]
    ids = [f"bag {number}" for number in range(len(bags))]
    backwards = list(range(len(bags)))[::-1]
    settings = {"keep_negatives": 0.5, "keep_positives": 0.5}
    one = kept_of_each_bag(bags, resample_witness_rate(*flatten(bags), bag_ids=ids, **settings))
    turned = [bags[k] for k in backwards]
    other = resample_witness_rate(*flatten(turned), bag_ids=[ids[k] for k in backwards], **settings)
    assert kept_of_each_bag(turned, other) == one[::-1]
    again = resample_witness_rate(*flatten(bags), bag_ids=ids, seed=1, **settings)
    assert kept_of_each_bag(bags, again) != one


def test_a_smaller_share_is_part_of_a_larger_one():
    bags = random_bags(4)
    kept = [
        set(resample_witness_rate(*flatten(bags), keep_negatives=share, keep_positives=share).tolist())
        for share in (0.0, 0.05, 0.3, 0.35, 0.9, 1.0)
    ]
    assert all(fewer < more for fewer, more in pairwise(kept))
    assert len(kept[-1]) == flatten(bags)[2][-1]


def test_every_instance_of_a_class_is_as_likely_to_stay():
    stays = np.zeros(20)
    for seed in range(2000):
        stays[resample_witness_rate([1] * 10 + [0] * 10, [1], [0, 20], keep_negatives=0.25, seed=seed)] += 1
    assert (stays[:10] == 2000).all()
    assert stays[10:] / 2000 == pytest.approx(np.full(10, 0.25), abs=0.05)


@pytest.mark.parametrize(
    ("labels", "bag_label", "message"),
    [
        ([1, -1, 0], 1, "1 of its 3 instances have no label; label them"),
        ([0, 0, 0], 1, "positive but all its instances are labelled negative"),
        ([0, 1, 1], 0, "negative but 2 of its instances are labelled positive"),
        ([0, 2, 1], 1, "must be 1, 0 or -1"),
        ([0, 1, 1], 3, "bag labels must be 1 or 0"),
        ([], 0, "no bag may be empty"),
    ],
)
def test_labels_that_contradict_are_refused(labels, bag_label, message):
    with pytest.raises(InputError, match=message):
        resample_witness_rate(labels, [bag_label], [0, len(labels)])
    with pytest.raises(InputError, match=message):
        split_into_sub_bags(labels, bag_label)


def test_unknown_instances_of_a_negative_bag_are_negative():
    kept = resample_witness_rate([-1] * 40, [0], [0, 40], keep_negatives=0.5, keep_positives=0, negative_bags=True)
    assert len(kept) == 20
    assert [len(part) for part in split_into_sub_bags([-1] * 40, 0, size=20)] == [20, 20]


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_shares_out_of_range_are_refused(share):
    with pytest.raises(InputError, match="keep_negatives must be a share from 0 to 1"):
        resample_witness_rate([1, 0], [1], [0, 2], keep_negatives=share)
    with pytest.raises(InputError, match="keep_positives must be a share from 0 to 1"):
        resample_witness_rate([1, 0], [1], [0, 2], keep_positives=share)


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="offsets must rise"):
        resample_witness_rate([1, 0, 0], [1], [0, 2])
    with pytest.raises(InputError, match="expected shapes"):
        resample_witness_rate([1, 0, 0], [1, 0], [0, 3])
    with pytest.raises(InputError, match="2 bag_ids for 1"):
        resample_witness_rate([1, 0, 0], [1], [0, 3], bag_ids=["a", "b"])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [1, 7, 25, 60, 500])
def test_sub_bags_are_a_true_and_even_partition(size, seed):
    for label, labels in random_bags(seed, count=30, largest=700):
        parts = [part.tolist() for part in split_into_sub_bags(labels, label, size=size, seed=seed)]
        assert sorted(k for part in parts for k in part) == list(range(len(labels)))
        assert all(part == sorted(part) for part in parts)
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        held = [[labels[k] for k in part] for part in parts]
        assert all(max(part) == label for part in held)
        wanted = math.ceil(len(labels) / size)
        if label and labels.count(1) < wanted:
            assert len(parts) == labels.count(1)
        else:
            assert len(parts) == wanted
            assert max(sizes) <= size
            assert wanted == 1 or min(sizes) >= size // 2
        # positives are dealt out evenly: within one of the share that the witness rate of the bag would give
        for part in held:
            assert abs(part.count(1) - labels.count(1) / len(labels) * len(part)) < 2
        positives = [part.count(1) for part in held]
        assert max(positives) - min(positives) <= 1


def test_sub_bags_of_a_slide_have_its_witness_rate():
    rng = np.random.default_rng(0)
    labels = (rng.random(2300) < 0.109).astype(int)
    parts = split_into_sub_bags(labels, 1)
    assert [len(part) for part in parts] == [460] * 5
    for part in parts:
        assert labels[part].mean() == pytest.approx(labels.mean(), abs=1 / 460)


def test_sub_bags_are_random_by_seed():
    labels = [1] * 10 + [0] * 90
    one, again, other = (split_into_sub_bags(labels, 1, size=50, seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not np.array_equal(one[0], other[0])
    # the even and the odd positions would be no random division
    assert 1 in np.diff(one[0])


def test_sub_bags_need_a_size():
    with pytest.raises(InputError, match="at least 1"):
        split_into_sub_bags([0, 0], 0, size=0)


@pytest.fixture
def large(tmp_path, make_picture):
    """Four bags in each split, two of each class, of 12 to 21 images; a third of a positive bag is positive."""
    folder = tmp_path / "large-source"
    folder.mkdir()
    bags, instances, number = ["bag_id,label,patient,split,site"], ["bag_id,file,label"], 0
    for split in ("train", "val", "test"):
        for k in range(4):
            bags.append(f"{split}-{k},{k % 2},p{split}{k // 2},{split},ward {k}")
            for instance in range(12 + 3 * k):
                make_picture(number).save(folder / f"{number}.png")
                instances.append(f"{split}-{k},{number}.png,{int(k % 2 == 1 and instance % 3 == 1)}")
                number += 1
    (folder / "bags.csv").write_text("\n".join(bags) + "\n")
    (folder / "instances.csv").write_text("\n".join(instances) + "\n")
    manifest = read_manifest(folder / "bags.csv", folder / "instances.csv")
    pack_images(manifest, tmp_path / "large", tile_size=TILE_SIZE, encoding="png", workers=2)
    return Cohort.open(tmp_path / "large")


def content(cohort):
    """Everything known of each instance, by bag."""
    found = {}
    for bag_id in cohort.bags["bag_id"].tolist():
        tiles = cohort.tile_file(bag_id)
        rows = zip(tiles.names, tiles.coords.tolist(), tiles.labels.tolist(), strict=True)
        found[bag_id] = {name: (tiles.encoded(k), coords, label) for k, (name, coords, label) in enumerate(rows)}
    return found


def errors(folder):
    return [finding for finding in examine(folder) if finding.level == "error"]


def stamps(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*") if path.is_file()}


def test_cohort_of_another_witness_rate(large, tmp_path):
    seen = []
    summary = resample_cohort(large, tmp_path / "new", keep_negatives=0.25, progress=lambda *done: seen.append(done))
    new = Cohort.open(tmp_path / "new")
    assert errors(tmp_path / "new") == []
    assert seen[-1] == (12, 12)
    before, after = content(large), content(new)
    assert list(after) == list(before)
    for bag_id, kept in after.items():
        assert kept.items() <= before[bag_id].items()
    columns = ["bag_id", "label", "split", "group", "site"]
    assert new.bags[columns].equals(large.bags[columns])
    for label, n_new, n_old in zip(new.bags["label"], new.bags["n_instances"], large.bags["n_instances"], strict=True):
        assert n_new < n_old if label else n_new == n_old
    rates = [
        witness_rate(some.instance_labels(), some.bags["label"].to_numpy(), some.offsets()) for some in (large, new)
    ]
    assert summary == ResampleSummary(rates[0], rates[1], 12, new.n_instances)
    assert summary.witness_rate_before == pytest.approx(1 / 3)
    assert summary.witness_rate_after == pytest.approx(2 / 3, abs=0.06)
    one, other = large.tile_file("val-3"), new.tile_file("val-3")
    assert other.attributes["resampled_from"] == "val-3"
    assert one.attributes["source"] == other.attributes["source"]
    assert one.attributes["fingerprint"] == other.attributes["fingerprint"]


def test_cohort_of_sub_bags(large, tmp_path):
    summary = resample_cohort(large, tmp_path / "new", sub_bag_size=12)
    new = Cohort.open(tmp_path / "new")
    assert errors(tmp_path / "new") == []
    assert summary == ResampleSummary(pytest.approx(1 / 3), pytest.approx(1 / 3), len(new), large.n_instances)
    before, after = content(large), content(new)
    assert {"train-0", "train-1#1", "train-1#2", "test-3#1", "test-3#2"} <= set(after)
    assert len(after) == 3 * 7
    origin = large.bags.set_index("bag_id")
    for row in new.bags.itertuples():
        original = origin.loc[row.bag_id.split("#")[0]]
        same = [original["label"], original["split"], original["group"], original["site"]]
        assert [row.label, row.split, row.group, row.site] == same
        assert max(label for _, _, label in after[row.bag_id].values()) == row.label
        assert new.tile_file(row.bag_id).bag_id == row.bag_id
    for bag_id, instances in before.items():
        parts = [part for name, part in after.items() if name.split("#")[0] == bag_id]
        assert sum(map(len, parts)) == len(instances)
        assert {name: known for part in parts for name, known in part.items()} == instances


def test_only_the_named_splits_are_resampled(large, tmp_path):
    summary = resample_cohort(large, tmp_path / "new", keep_positives=0, sub_bag_size=9, splits=["train"])
    new = Cohort.open(tmp_path / "new")
    assert errors(tmp_path / "new") == []
    before, after = content(large), content(new)
    for bag_id, instances in before.items():
        assert (after.get(bag_id) == instances) == (not bag_id.startswith("train"))
    positive = [bag for name, bag in after.items() if name.startswith(("train-1", "train-3"))]
    positives = [sum(label for _, _, label in bag.values()) for bag in positive]
    assert positives == [1, 1]  # a positive bag of one positive cannot be divided
    assert summary.witness_rate_after == pytest.approx(2 / sum(map(len, positive)))


def test_same_again_does_nothing_and_what_is_missing_is_made(large, tmp_path):
    settings = {"keep_negatives": 0.5, "sub_bag_size": 5, "seed": 2}
    summary = resample_cohort(large, tmp_path / "new", **settings, workers=1)
    before = stamps(tmp_path / "new")
    assert resample_cohort(large, tmp_path / "new", **settings, splits=["test", "val", "train"]) == summary
    assert stamps(tmp_path / "new") == before
    made = content(Cohort.open(tmp_path / "new"))
    tile_path(tmp_path / "new", "train-1#1").unlink()
    (tmp_path / "new" / "bags.csv").unlink()
    assert resample_cohort(large, tmp_path / "new", **settings) == summary
    assert content(Cohort.open(tmp_path / "new")) == made


def test_content_depends_on_the_seed_not_on_the_order_of_bags(large, tmp_path):
    settings = {"keep_negatives": 0.5, "sub_bag_size": 5}
    turned = Cohort(large.path, large.bags.iloc[::-1].reset_index(drop=True), large.info)
    for name, cohort, seed in (("one", large, 0), ("turned", turned, 0), ("other", large, 1)):
        resample_cohort(cohort, tmp_path / name, **settings, seed=seed)
    one, backwards, other = (content(Cohort.open(tmp_path / name)) for name in ("one", "turned", "other"))
    assert one == backwards
    assert one != other


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"keep_negatives": 0.4}, "keep_negatives: 0.5 there, 0.4 asked for"),
        ({"keep_positives": 0.4}, "keep_positives: 1.0 there, 0.4 asked for"),
        ({"negative_bags": True}, "negative_bags: False there, True asked for"),
        ({"sub_bag_size": 5}, "sub_bag_size: None there, 5 asked for"),
        ({"seed": 1}, "seed: 0 there, 1 asked for"),
        ({"splits": ["train"]}, r"splits: \['train', 'val', 'test'\] there, \['train'\] asked for"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(cohort, tmp_path, change, shown):
    resample_cohort(cohort, tmp_path / "new", keep_negatives=0.5)
    before = stamps(tmp_path / "new")
    with pytest.raises(InputError, match=shown):
        resample_cohort(cohort, tmp_path / "new", **{"keep_negatives": 0.5, **change})
    assert stamps(tmp_path / "new") == before


def test_another_original_is_refused(cohort, tmp_path):
    resample_cohort(cohort, tmp_path / "new", keep_negatives=0.5)
    with pytest.raises(InputError, match="fingerprint: "):
        resample_cohort(cohort.without_test(), tmp_path / "new", keep_negatives=0.5)
    regrouped = Cohort(cohort.path, cohort.bags.assign(group=cohort.bags["bag_id"]), cohort.info)
    with pytest.raises(InputError, match="fingerprint: "):
        resample_cohort(regrouped, tmp_path / "new", keep_negatives=0.5)


def test_folders_of_something_else_are_refused(cohort, tmp_path):
    with pytest.raises(InputError, match=r"source: .* there, resampl"):
        resample_cohort(cohort, cohort.path)
    with pytest.raises(InputError, match="holds other files"):
        resample_cohort(cohort, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        resample_cohort(cohort, tmp_path / "file")


def test_wrong_settings_are_refused_before_anything_is_written(cohort, tmp_path):
    for settings, message in (
        ({"keep_negatives": 2}, "keep_negatives must be"),
        ({"sub_bag_size": 0}, "at least 1"),
        ({"splits": ["dev"]}, "splits must be some of train, val, test"),
        ({"splits": "train"}, "splits must be some of train, val, test"),
        ({"splits": []}, "splits must be some of train, val, test"),
    ):
        with pytest.raises(InputError, match=message):
            resample_cohort(cohort, tmp_path / "new", **settings)
    with pytest.raises(InputError, match="out of reach"):
        resample_cohort(cohort.without_labels(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_cohort_without_instance_labels_is_refused(source, tmp_path):
    lines = [line.rsplit(",", 1)[0] for line in source.instances.read_text().splitlines()]
    source.instances.write_text("\n".join(lines) + "\n")
    pack_images(source.manifest, tmp_path / "cohort", tile_size=TILE_SIZE, workers=1)
    with pytest.raises(InputError, match=r"no instance labels, and .* add a column 'label'"):
        resample_cohort(Cohort.open(tmp_path / "cohort"), tmp_path / "new")


def test_unknown_labels_are_refused_where_they_matter(source, tmp_path):
    lines = source.instances.read_text().splitlines()
    for bag_id in ("val-003", "train-000"):  # a positive bag of val, a negative one of train
        row = max(k for k, line in enumerate(lines) if line.startswith(bag_id))
        lines[row] = lines[row].rsplit(",", 1)[0] + ","
    source.instances.write_text("\n".join(lines) + "\n")
    pack_images(source.manifest, tmp_path / "cohort", tile_size=TILE_SIZE, workers=1)
    cohort = Cohort.open(tmp_path / "cohort")
    with pytest.raises(InputError, match="bag 'val-003': is positive and 1 of its 5 instances have no label; label"):
        resample_cohort(cohort, tmp_path / "new")
    resample_cohort(cohort, tmp_path / "new", splits=["train", "test"])
    assert errors(tmp_path / "new") == []
    assert -1 in read_tiles(tile_path(tmp_path / "new", "train-000")).labels


def test_no_positive_bag_is_refused(cohort, tmp_path):
    negative = Cohort(cohort.path, cohort.bags[cohort.bags["label"] == 0], cohort.info)
    with pytest.raises(InputError, match="no positive bag in train, val, test"):
        resample_cohort(negative, tmp_path / "new")


def test_sub_bag_whose_name_is_taken_is_refused(cohort, tmp_path):
    bags = cohort.bags.copy()
    bags.loc[0, "bag_id"] = "train-002#1"
    tile_path(cohort.path, "train-000").rename(tile_path(cohort.path, "train-002#1"))
    write_bags(cohort.path, bags)
    with pytest.raises(InputError, match=r"rename these bags of .*'train-002#1' was already used"):
        resample_cohort(Cohort.open(cohort.path), tmp_path / "new", sub_bag_size=3)


def test_settings_are_recorded(cohort, tmp_path):
    resample_cohort(cohort, tmp_path / "new", keep_negatives=0.5, negative_bags=True, seed=4)
    settings = json.loads((tmp_path / "new" / "cohort.json").read_text())["settings"]
    assert settings["source"] == "resampled"
    assert settings["cohort"] == "cohort"
    assert (settings["keep_negatives"], settings["negative_bags"], settings["seed"]) == (0.5, True, 4)
