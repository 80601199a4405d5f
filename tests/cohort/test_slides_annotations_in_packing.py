"""Annotations on the way into a cohort; the formats themselves are tested elsewhere."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tests.cohort.slide_files import draw, write_plain

from its2clr.cohort import Cohort, read_tiles, tile_path
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.cohort.slides.classes import check_chosen_classes
from its2clr.cohort.slides.one_slide import finished, pack_slide
from its2clr.cohort.tiles import decode
from its2clr.errors import InputError

SETTINGS = SlideSettings(mpp=0.5, tile_size=64, min_saturation=0.0)
OUTLINE = [[64, 0], [160, 0], [160, 128], [64, 128], [64, 0]]
HOLE = [[70, 70], [90, 70], [90, 90], [70, 90], [70, 70]]


def geojson(name="Tumor"):
    geometry = {"type": "Polygon", "coordinates": [OUTLINE, HOLE]}
    return json.dumps({"type": "Feature", "geometry": geometry, "properties": {"classification": {"name": name}}})


@pytest.fixture
def manifest(tmp_path):
    folder = tmp_path / "slides"
    (folder / "drawn").mkdir(parents=True)
    rows = ["bag_id,file,label,annotation"]
    for number in range(4):
        write_plain(folder / f"{number}.tif", draw(256, 192, seed=number))
        rows.append(f"{number},{number}.tif,{number % 2},{'one.geojson' if number == 1 else ''}")
    (folder / "drawn" / "one.geojson").write_text(geojson())
    (folder / "slides.csv").write_text("\n".join(rows) + "\n")
    return folder / "slides.csv"


def images_of(out, bag_id):
    tiles = read_tiles(tile_path(out, bag_id))
    return np.stack([decode(tiles.encoded(index)) for index in range(len(tiles))])


def labels_of(out, bag_id):
    return read_tiles(tile_path(out, bag_id)).labels.reshape(3, 4).tolist()


def test_covered_share_becomes_ground_truth(manifest, tmp_path):
    slides = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn")
    assert slides.annotated
    out = tmp_path / "out"
    for slide in slides.slides:
        assert pack_slide(slide, out, SETTINGS).left_out == ()
    assert labels_of(out, "1") == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert labels_of(out, "0") == [[0] * 4] * 3  # a negative slide without annotation has no positive tile
    assert labels_of(out, "3") == [[-1] * 4] * 3  # of a positive one nothing is known
    pack_slide(slides.slides[1], out, replace(SETTINGS, min_covered=0.6))
    assert labels_of(out, "1") == [[0, 1, -1, 0], [0, 1, -1, 0], [0, 0, 0, 0]]


def test_annotations_are_drawn(manifest, tmp_path, monkeypatch):
    monkeypatch.setattr("its2clr.cohort.slides.overview._LARGEST_TILE", 64)  # so a pixel is one of the slide
    slide = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn").slides[1]
    pack_slide(slide, tmp_path / "out", SETTINGS)
    picture = np.asarray(Image.open(tmp_path / "out" / "overviews" / "1.png")).astype(int)
    red = (picture[..., 0] > 200) & (picture[..., 1] < 40) & (picture[..., 2] < 40)
    assert red[100, 160]
    assert red[64:128, 64].all()
    assert red[80, 70]  # the hole has its outline too
    assert not red[150:].any()


def test_a_mask_is_scaled_to_the_slide(manifest, tmp_path):
    slide = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn").slides[1]
    mask = np.zeros((48, 64), dtype=np.uint8)
    mask[0:32, 16:40] = 255  # the outline at a quarter of the size
    for name in ("mask.png", "mask.tif"):
        Image.fromarray(mask).save(tmp_path / name)
        result = pack_slide(replace(slide, annotation=tmp_path / name), tmp_path / "out", SETTINGS)
        assert result.left_out == ()
        assert labels_of(tmp_path / "out", "1") == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    Image.new("L", (64, 64)).save(tmp_path / "square.png")
    problem = (
        pack_slide(replace(slide, annotation=tmp_path / "square.png"), tmp_path / "out", SETTINGS).left_out[0].problem
    )
    assert "not the same shape" in problem


def test_a_bad_annotation_leaves_the_slide_out(manifest, tmp_path):
    slide = read_slide_manifest(manifest).slides[1]  # the annotations are elsewhere
    result = pack_slide(slide, tmp_path / "out", SETTINGS)
    assert "annotation cannot be used" in result.left_out[0].problem
    assert "one.geojson" in result.left_out[0].problem
    assert not tile_path(tmp_path / "out", "1").exists()


def square(left, top, side=64):
    ring = [[left, top], [left + side, top], [left + side, top + side], [left, top + side], [left, top]]
    return json.dumps({"type": "Polygon", "coordinates": [ring]})


def test_an_annotation_that_does_not_fit_the_slide_is_said(manifest, tmp_path):
    slide = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn").slides[1]
    slide.annotation.write_text(square(9000, 100))
    problem = pack_slide(slide, tmp_path / "out", SETTINGS).left_out[0].problem
    assert "x 9000 to 9064, y 100 to 164, outside the slide of 256 x 192 pixels" in problem
    slide.annotation.write_text(square(224, 0))  # half of it
    notes = pack_slide(slide, tmp_path / "out", SETTINGS).notes
    assert notes[0].startswith("no annotation has a class")
    assert notes[1].startswith("50% of the annotated area lies outside the slide")


def test_annotation_and_label_that_contradict_each_other_are_said(manifest, tmp_path):
    slides = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn").slides
    negative = replace(slides[0], annotation=slides[1].annotation)
    notes = pack_slide(negative, tmp_path / "out", SETTINGS).notes
    assert notes == ("is labelled 0, but 4 of its tiles hold annotated tumour; which of them is right?",)
    assert finished(negative, tmp_path / "out", SETTINGS).notes == notes
    slides[1].annotation.write_text(square(10, 10, side=4))
    strict = replace(SETTINGS, min_covered=0.5)
    notes = pack_slide(slides[1], tmp_path / "out", strict).notes
    assert notes[0].startswith("none of its kept tiles counts as tumour")
    assert pack_slide(slides[1], tmp_path / "out", SETTINGS).notes == (
        "no annotation has a class; all count as tumour",
    )


def test_classes_of_unknown_meaning_must_be_named(manifest, tmp_path):
    slide = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn").slides[1]
    slide.annotation.write_text(geojson("DCIS"))
    assert "DCIS" in pack_slide(slide, tmp_path / "out", SETTINGS).left_out[0].problem
    assert pack_slide(slide, tmp_path / "out", replace(SETTINGS, classes=("DCIS",))).left_out == ()
    assert labels_of(tmp_path / "out", "1") == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("method", ["macenko", "vahadane"])
def test_stains_are_normalised_on_the_way(manifest, tmp_path, method):
    import torch

    from its2clr.cohort.slides.stain import StainNormaliser

    slide = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn").slides[0]
    lossless = replace(SETTINGS, encoding="png")
    plain, stained = (tmp_path / name for name in ("plain", "stained"))
    pack_slide(slide, plain, lossless)
    result = pack_slide(slide, stained, replace(lossless, stain=method))
    tiles = torch.from_numpy(images_of(plain, "0")).permute(0, 3, 1, 2)
    normaliser = StainNormaliser(method)
    normaliser.fit(tiles)
    expected = normaliser.apply(tiles).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(images_of(stained, "0"), expected)
    assert bool(result.notes) == bool(normaliser.note)
    assert finished(slide, stained, replace(lossless, stain=method)).notes == result.notes


def test_a_changed_annotation_is_read_again(manifest, tmp_path):
    slide = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn").slides[1]
    pack_slide(slide, tmp_path / "out", SETTINGS)
    assert finished(slide, tmp_path / "out", SETTINGS) is not None
    slide.annotation.write_text(geojson() + " ")
    assert finished(slide, tmp_path / "out", SETTINGS) is None


def test_a_cohort_with_annotations_has_instance_labels(manifest, tmp_path, monkeypatch):
    from its2clr.cohort.slides import slide_cohort

    def here(work, items, *_):
        return ((name, work(items[name])) for name in items)

    monkeypatch.setattr(slide_cohort, "spread", here)
    text = manifest.read_text().replace(",annotation", ",annotation,split")
    for number in range(4, 6):
        write_plain(manifest.parent / f"{number}.tif", draw(256, 192, seed=number))
        text += f"{number},{number}.tif,{number % 2},\n"
    splits = ["train", "train", "val", "val", "test", "test"]
    lines = text.splitlines()
    manifest.write_text(
        "\n".join([lines[0], *(f"{line},{split}" for line, split in zip(lines[1:], splits, strict=True))])
    )
    slides = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn")
    slide_cohort.pack_slides(slides, tmp_path / "out", SETTINGS)
    cohort = Cohort.open(tmp_path / "out")
    assert cohort.has_instance_labels
    assert (cohort.instance_labels() == 1).sum() == 4


def test_a_class_that_is_nowhere_is_refused_before_tiling(manifest, tmp_path):
    slides = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn")
    slides.slides[1].annotation.write_text(geojson("DCIS"))
    message = (
        "--class 'DCSI' is in none of the annotations, did you mean 'DCIS'[?] of 1 annotations there is 'DCIS' in 1"
    )
    with pytest.raises(InputError, match=message):
        pack_slides(slides, tmp_path / "out", replace(SETTINGS, classes=("DCIS", "DCSI")), workers=1)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"in 1 annotations: 'DCIS' in 1\); name those that count with --class"):
        pack_slides(slides, tmp_path / "out", SETTINGS, workers=1)
    assert not (tmp_path / "out").exists()


def test_the_values_of_a_mask_are_classes_too(manifest, tmp_path):
    rows = manifest.read_text().replace("one.geojson", "one.png")
    manifest.write_text(rows)
    mask = np.zeros((192, 256), np.uint8)
    mask[:64, :64], mask[64:128, :64] = 1, 2
    Image.fromarray(mask).save(manifest.parent / "drawn" / "one.png")
    slides = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn")
    with pytest.raises(InputError, match=r"--class '3' is in none .* there is '1' in 1, '2' in 1"):
        check_chosen_classes([slides.slides[1].annotation], ["1", "3"])
    check_chosen_classes([slides.slides[1].annotation], ["2"])


def test_a_positive_slide_without_any_tumour_is_unknown_not_negative(manifest, tmp_path):
    slide = read_slide_manifest(manifest, annotations_root=manifest.parent / "drawn").slides[1]
    slide.annotation.write_text(geojson("Stroma"))
    notes = pack_slide(slide, tmp_path / "out", replace(SETTINGS, classes=("Tumor",))).notes
    assert notes[0].startswith("nothing of its annotation counts as tumour")
    assert np.unique(labels_of(tmp_path / "out", "1")).tolist() == [-1]
    negative = replace(slide, unannotated=0)
    assert pack_slide(negative, tmp_path / "out", replace(SETTINGS, classes=("Tumor",))).left_out == ()
    assert np.unique(labels_of(tmp_path / "out", "1")).tolist() == [0]
