import csv
import io
import json
import math

import numpy as np
import pytest
from PIL import Image

from its2clr.cohort import Cohort, decode, pack_images, read_manifest, read_tiles, tile_path
from its2clr.cohort import images as images_module
from its2clr.cohort.image_files import ImageProblem, prepare_image
from its2clr.errors import InputError


def pack(source, out, **changes):
    return pack_images(source.manifest, out, **{"tile_size": 16, "encoding": "png", "workers": 2, **changes})


def problems_of(out):
    with (out / "problems.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def instance_rows(source):
    with source.instances.open(newline="") as file:
        return [(row, line) for row, line in enumerate(csv.DictReader(file), start=2)]


def test_pack_writes_a_whole_cohort(source, tmp_path):
    seen = []
    summary = pack(source, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert (summary.n_bags, summary.n_instances, summary.n_packed, summary.n_skipped) == (12, 42, 12, 0)
    assert seen == [(i, 12) for i in range(1, 13)]
    header = (tmp_path / "out" / "bags.csv").read_text().splitlines()[0]
    assert header == "bag_id,label,split,group,site,n_instances"
    info = json.loads((tmp_path / "out" / "cohort.json").read_text())
    assert info["tile_size"] == 16
    assert info["encoding"] == "png"
    assert info["has_instance_labels"] is True
    assert info["settings"]["splits"] == "manifest"
    assert problems_of(tmp_path / "out") == []
    leftovers = [p for p in (tmp_path / "out").rglob("*") if p.name.startswith(".")]
    assert leftovers == []


def test_images_of_the_right_kind_keep_their_bytes(source, tmp_path):
    pack(source, tmp_path / "out")
    stored = {}
    for path in (tmp_path / "out" / "tiles").iterdir():
        tiles = read_tiles(path)
        stored |= {name: tiles.encoded(i) for i, name in enumerate(tiles.names)}
    assert len(stored) == 42
    for name, content in stored.items():
        assert content == (source.folder / name).read_bytes()


def test_other_sizes_are_resized_and_encoded(source, tmp_path):
    pack(source, tmp_path / "out", tile_size=8, encoding="jpeg", resize="nearest")
    tiles = read_tiles(tile_path(tmp_path / "out", "val-001"))
    assert tiles.encoding == "jpeg"
    assert tiles.encoded(0)[:2] == b"\xff\xd8"
    assert decode(tiles.encoded(0)).shape == (8, 8, 3)
    assert tiles.coords.tolist() == [[0, 0], [8, 0], [0, 8]]


@pytest.mark.parametrize(("side", "expected"), [(27, 64), (96, 96), (512, 224)])
def test_the_usual_tile_size_is_that_of_the_images_within_bounds(tmp_path, side, expected):
    (tmp_path / "bag").mkdir()
    for number in range(3):
        Image.new("RGB", (side, side - 3), (number, 0, 0)).save(tmp_path / "bag" / f"{number}.png")
    (tmp_path / "bag" / "broken.png").write_bytes(b"not an image")
    (tmp_path / "m.csv").write_text("bag_id,path,label\nbag,bag,1\n")
    assert images_module.usual_tile_size(read_manifest(tmp_path / "m.csv", labelled=False)) == expected


def test_again_skips_what_is_there(source, tmp_path):
    out = tmp_path / "out"
    pack(source, out)
    before = {p: p.stat().st_mtime_ns for p in (out / "tiles").iterdir()}
    bags = (out / "bags.csv").read_text()
    summary = pack(source, out)
    assert (summary.n_packed, summary.n_skipped) == (0, 12)
    assert {p: p.stat().st_mtime_ns for p in (out / "tiles").iterdir()} == before
    assert (out / "bags.csv").read_text() == bags


def test_stopped_half_way_goes_on(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    real, calls = images_module.write_tile_file, []

    def stops_at_the_sixth(*args, **kwargs):
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(args[0])
        real(*args, **kwargs)

    monkeypatch.setattr(images_module, "write_tile_file", stops_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        pack(source, out, workers=1)
    assert not (out / "bags.csv").exists()
    with pytest.raises(InputError, match="incomplete"):
        Cohort.open(out)
    monkeypatch.setattr(images_module, "write_tile_file", real)
    summary = pack(source, out, workers=1)
    assert (summary.n_packed, summary.n_skipped) == (7, 5)
    assert len(Cohort.open(out)) == 12


def test_a_damaged_tile_file_and_a_changed_image_are_packed_again(source, tmp_path, make_picture):
    out = tmp_path / "out"
    pack(source, out)
    damaged = tile_path(out, "train-000")
    damaged.write_bytes(damaged.read_bytes()[:500])
    changed = next(line for _, line in instance_rows(source) if line["bag_id"] == "test-003")
    make_picture(999, size=40).save(source.folder / changed["file"])
    summary = pack(source, out)
    assert (summary.n_packed, summary.n_skipped) == (2, 10)
    assert len(read_tiles(damaged)) == 2


def test_other_settings_are_refused_with_the_difference(source, tmp_path):
    pack(source, tmp_path / "out")
    with pytest.raises(InputError, match="tile_size: 16 there, 32 asked for") as raised:
        pack(source, tmp_path / "out", tile_size=32)
    assert "encoding" not in str(raised.value)
    assert len(Cohort.open(tmp_path / "out")) == 12


def test_a_folder_of_other_things_is_refused(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.doc").write_text("x")
    with pytest.raises(InputError, match=r"thesis\.doc"):
        pack(source, tmp_path / "out")
    with pytest.raises(InputError, match="is a file"):
        pack(source, source.bags)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_size": 0}, "tile_size"),
        ({"encoding": "gif"}, "encoding must be one of jpeg, png"),
        ({"resize": "lanczos"}, "resize must be one of"),
        ({"quality": 0}, "quality"),
        ({"workers": 0}, "workers"),
    ],
)
def test_wrong_settings_are_refused(source, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        pack(source, tmp_path / "out", **changes)


def test_bad_images_are_left_out_and_listed(source, tmp_path):
    rows = instance_rows(source)
    picked = [(row, line["file"]) for row, line in rows if line["bag_id"] == "train-003"][:4]
    (source.folder / picked[0][1]).write_text("not an image")
    content = (source.folder / picked[1][1]).read_bytes()
    (source.folder / picked[1][1]).write_bytes(content[: len(content) // 2])
    (source.folder / picked[2][1]).unlink()
    (source.folder / picked[3][1]).write_bytes(b"")
    out = tmp_path / "out"
    summary = pack(source, out)
    assert summary.n_images_left_out == 4
    assert summary.bags_left_out == ()
    found = problems_of(out)
    assert [(p["bag_id"], int(p["row"]), p["file"]) for p in found] == [("train-003", *one) for one in picked]
    for problem, words in zip(found, ["no image", "cannot be decoded", "does not exist", "empty"], strict=True):
        assert words in problem["problem"]
    cohort = Cohort.open(out)
    assert cohort.bags.set_index("bag_id").loc["train-003", "n_instances"] == 1
    # the witness was image 1, which is gone; the labels of those left stay theirs
    assert cohort.tile_file("train-003").labels.tolist() == [0]
    # the remaining image keeps the place it has in the whole bag
    assert cohort.tile_file("train-003").coords.tolist() == [[16, 16]]


def test_labels_stay_with_their_images(source, tmp_path):
    first = next(line["file"] for _, line in instance_rows(source) if line["bag_id"] == "train-003")
    (source.folder / first).unlink()
    pack(source, tmp_path / "out")
    tiles = read_tiles(tile_path(tmp_path / "out", "train-003"))
    assert tiles.labels.tolist() == [1, 0, 0, 0]
    assert first not in tiles.names


def test_a_whole_cohort_that_is_being_changed_does_not_look_whole(source, tmp_path, monkeypatch):
    pack(source, tmp_path / "out")
    tile_path(tmp_path / "out", "train-000").unlink()

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(images_module, "write_tile_file", stop)
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "out")
    assert not (tmp_path / "out" / "bags.csv").exists()


def test_repaired_images_are_taken_up_again(source, tmp_path):
    name = instance_rows(source)[0][1]["file"]
    content = (source.folder / name).read_bytes()
    (source.folder / name).write_bytes(b"")
    out = tmp_path / "out"
    assert pack(source, out).n_instances == 41
    assert len(problems_of(out)) == 1
    assert pack(source, out).n_images_left_out == 1
    assert len(problems_of(out)) == 1
    (source.folder / name).write_bytes(content)
    assert pack(source, out).n_instances == 42
    assert problems_of(out) == []


def lose(source, bag_id):
    for _, line in instance_rows(source):
        if line["bag_id"] == bag_id:
            (source.folder / line["file"]).unlink()


def test_a_bag_without_usable_images_is_left_out(source, tmp_path):
    lose(source, "train-000")
    out = tmp_path / "out"
    summary = pack(source, out)
    assert summary.bags_left_out == ("train-000",)
    assert summary.n_bags == 11
    assert "train-000" not in Cohort.open(out).bags["bag_id"].tolist()
    last = problems_of(out)[-1]
    assert (last["bag_id"], last["file"], last["row"]) == ("train-000", "", "2")
    assert "whole bag was left out" in last["problem"]


def test_a_split_that_loses_a_class_is_an_error(source, tmp_path):
    lose(source, "val-001")
    lose(source, "val-003")
    with pytest.raises(InputError, match=r"after leaving out 2 bags.*split 'val' has no bag with label 1"):
        pack(source, tmp_path / "out")
    assert len(problems_of(tmp_path / "out")) == 3 + 5 + 2
    assert not (tmp_path / "out" / "bags.csv").exists()


def test_splits_are_assigned_when_there_are_none(source, tmp_path):
    lines = [line.rsplit(",", 2)[0] for line in source.bags.read_text().splitlines()]
    source.bags.write_text("\n".join(lines))
    pack(source, tmp_path / "out", seed=3, fractions=(0.4, 0.3, 0.3))
    bags = Cohort.open(tmp_path / "out").bags
    assert set(bags["split"]) == {"train", "val", "test"}
    assert bags.groupby("group")["split"].agg(set).map(len).max() == 1
    assert bags.groupby("split")["label"].agg(set).map(len).min() == 2
    with pytest.raises(InputError, match="seed: 3 there, 4 asked for"):
        pack(source, tmp_path / "out", seed=4, fractions=(0.4, 0.3, 0.3))


def test_odd_identifiers_survive(tmp_path, make_picture):
    ids = ["007", "a/b c", "NA", 'ü,"x"', "..", "50%"]
    with (tmp_path / "m.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["bag_id", "path", "label", "group"])
        for i, bag_id in enumerate(ids):
            (tmp_path / f"f{i}").mkdir()
            make_picture(i).save(tmp_path / f"f{i}" / "x.png")
            writer.writerow([bag_id, f"f{i}", i % 2, f"0{i}"])
    pack_images(read_manifest(tmp_path / "m.csv"), tmp_path / "out", tile_size=16)
    cohort = Cohort.open(tmp_path / "out")
    assert cohort.bags["bag_id"].tolist() == ids
    assert cohort.bags["group"].tolist() == ["00", "01", "02", "03", "04", "05"]
    assert [cohort.tile_file(bag_id).bag_id for bag_id in ids] == ids
    assert not cohort.has_instance_labels
    assert all(p.parent == tmp_path / "out" / "tiles" for p in (tmp_path / "out").rglob("*.h5"))


def prepare(tmp_path, image, kind, tile_size=4, **options):
    path = tmp_path / f"image.{kind}"
    image.save(path, **options)
    return path, prepare_image(path, tile_size=tile_size, encoding="png")


def test_sixteen_bit_grey_is_scaled_as_a_whole(tmp_path):
    values = np.array([[0, 257, 25700, 65535]] * 4, dtype=np.uint16)
    for kind in ("png", "tif"):
        _, tile = prepare(tmp_path, Image.fromarray(values), kind)
        assert decode(tile)[0, :, 0].tolist() == [0, 1, 100, 255]


def test_transparency_becomes_white(tmp_path):
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 255))
    image.putpixel((0, 0), (10, 20, 30, 0))
    _, tile = prepare(tmp_path, image, "png")
    assert decode(tile)[0, 0].tolist() == [255, 255, 255]
    assert decode(tile)[1, 1].tolist() == [10, 20, 30]
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([9, 8, 7, 1, 2, 3])
    palette.putpixel((1, 0), 1)
    _, tile = prepare(tmp_path, palette, "png", transparency=0)
    assert decode(tile)[0, :2].tolist() == [[255, 255, 255], [1, 2, 3]]


def test_exif_orientation_is_applied(tmp_path, make_picture):
    image = make_picture(0, size=4)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    path, tile = prepare(tmp_path, image, "png", exif=exif)
    np.testing.assert_array_equal(decode(tile), np.rot90(np.asarray(image), -1))
    assert tile != path.read_bytes()
    again = Image.open(io.BytesIO(tile))
    assert again.getexif().get(0x0112, 1) == 1


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "CMYK"])
def test_other_modes_become_rgb(tmp_path, make_picture, mode):
    kind = "tif" if mode == "CMYK" else "png"
    image = make_picture(1, size=4).convert("L" if mode == "LA" else "RGB").convert(mode)
    _, tile = prepare(tmp_path, image, kind)
    assert decode(tile).shape == (4, 4, 3)
    np.testing.assert_array_equal(decode(tile), np.asarray(image.convert("RGB")))


def test_pixels_of_unknown_range_are_a_problem(tmp_path):
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "f.tif")
    with pytest.raises(ImageProblem, match="floating point"):
        prepare_image(tmp_path / "f.tif", tile_size=4, encoding="png")
    Image.fromarray(np.full((4, 4), 100_000, np.int32)).save(tmp_path / "i.tif")
    with pytest.raises(ImageProblem, match="beyond 16 bits"):
        prepare_image(tmp_path / "i.tif", tile_size=4, encoding="png")


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9, 10, 17])
def test_virtual_grid_is_square_row_by_row_without_overlap(count):
    grid = images_module.virtual_grid(count, 32)
    columns = math.ceil(math.sqrt(count))
    expected = [(32 * (i % columns), 32 * (i // columns)) for i in range(count)]
    assert grid.tolist() == [list(place) for place in expected]
