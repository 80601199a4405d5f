"""The first manifests of a person: examined before packing, in the words of other programs, and tried again."""

import csv
from pathlib import Path

import numpy as np
import pytest
from tests.cohort.feature_files import trident
from tests.cohort.slide_files import draw, write_plain

from its2clr.cohort import Cohort, LeftOut, examine, read_manifest
from its2clr.cohort.features.feature_cohort import pack_features
from its2clr.cohort.features.feature_manifest import read_feature_manifest
from its2clr.cohort.findings import SlideQuestions
from its2clr.cohort.packing import frequent_reasons
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.errors import InputError
from its2clr.predict.new_cohort import features_of_folder, images_of_folder, slides_of_folder

SETTINGS = SlideSettings(mpp=0.5, tile_size=64, min_saturation=0.0)
VERTICES = '<Vertex X="0" Y="0"/><Vertex X="100" Y="0"/><Vertex X="100" Y="100"/>'


def imagescope(path, mpp="0.25", name="Layer 1"):
    region = f'<Regions><Region Id="1" Type="0"><Vertices>{VERTICES}</Vertices></Region></Regions>'
    layer = f'<Annotation Id="1" Name="{name}">{region}</Annotation>'
    path.write_text(f'<Annotations MicronsPerPixel="{mpp}">{layer}</Annotations>')


def said(findings, level):
    return [f"{one.where}: {one.message}" for one in findings if one.level == level]


@pytest.fixture
def slides(tmp_path):
    """Three slides of three patients; the scale of the last is unknown, and only its annotation says one."""
    folder = tmp_path / "scans"
    folder.mkdir()
    for number in range(3):
        mpp = None if number == 2 else 0.5
        write_plain(folder / f"s{number}.tif", draw(256, 192, seed=number), mpp=mpp)
    imagescope(folder / "s1.xml", mpp="0.5")
    imagescope(folder / "s2.xml")
    table = tmp_path / "slides.csv"
    rows = ["bag_id,file,label,patient,annotation", "s0,s0.tif,0,p0,", "s1,s1.tif,1,p1,s1.xml", "s2,s2.tif,1,p1,s2.xml"]
    table.write_text("\n".join(rows))
    return table


def questions(slides, **more):
    folder = slides.parent / "scans"
    return SlideQuestions(slides_root=folder, annotations_root=folder, **more)


def test_a_manifest_of_slides_is_examined(slides):
    findings = examine(slides, slides=questions(slides))
    assert said(findings, "error") == []
    (warning,) = said(findings, "warning")
    assert "row 4" in warning
    assert "the scale is unknown" in warning
    assert "(its annotation says 0.25 um/px, which --annotation-mpp takes); will be left out" in warning
    notes = said(findings, "note")
    assert any("annotated class 'Layer 1' (Id 1): 2 regions on 2 slides" in note for note in notes)
    assert any("3 bags (2 positive, 1 negative), 2 groups" in note for note in notes)
    assert any("fewer than 6 bags can be looked at, not trained with" in note for note in notes)
    findings = examine(slides, slides=questions(slides, annotation_scale=True))
    assert said(findings, "warning") == []
    assert any("row 4: the file does not say its scale; 0.25 um/px is used" in note for note in said(findings, "note"))


def test_what_would_fail_in_tiling_is_found_before(slides):
    (slides.parent / "scans" / "s0.tif").write_bytes(b"II*\0")
    imagescope(slides.parent / "scans" / "s1.xml", mpp="0.25", name="Necrosis")
    findings = examine(slides, slides=questions(slides, default_mpp=0.5))
    assert any("row 2" in one and "s0.tif" in one and "will be left out" in one for one in said(findings, "warning"))
    unlike = "row 3: its annotation was made at 0.25 um/px, the slide has 0.5"
    assert any(unlike in one for one in said(findings, "warning"))
    assert any("'Necrosis' (Id 1) in 1" in one for one in said(findings, "error"))
    findings = examine(slides, slides=questions(slides, classes=("x",)))
    assert any("--class 'x' is in none" in one for one in said(findings, "error"))


def test_three_slides_are_enough_to_tile(slides, tmp_path):
    folder = slides.parent / "scans"
    manifest = read_slide_manifest(slides, slides_root=folder, annotations_root=folder, annotation_scale=True)
    summary = pack_slides(manifest, tmp_path / "out", SETTINGS, workers=1)
    assert any("fewer than 6 bags can be looked at, not trained with" in line for line in summary.lines())
    cohort = Cohort.open(tmp_path / "out")
    assert cohort.bags["label"].tolist() == [0, 1, 1]
    assert cohort.bags["split"].tolist() == ["train"] * 3
    assert cohort.tile_file("s2").mpp_level0 == 0.25


def test_a_pack_that_fails_says_why_and_may_be_tried_with_other_settings(slides, tmp_path):
    for number in range(3):
        write_plain(slides.parent / "scans" / f"s{number}.tif", draw(256, 192, seed=number), mpp=None)
    folder, out = slides.parent / "scans", tmp_path / "out"
    manifest = read_slide_manifest(slides, slides_root=folder, annotations_root=folder)
    with pytest.raises(InputError) as failed:
        pack_slides(manifest, out, SETTINGS, workers=1)
    lines = str(failed.value).splitlines()
    assert "no bag is left" in lines[0]
    assert lines[1].startswith("  2 x the scale is unknown")
    assert lines[2].startswith("  1 x the scale is unknown")  # without an annotation there is no advice to take its
    other = SlideSettings(mpp=0.5, tile_size=32, min_saturation=0.0, default_mpp=0.5)
    assert pack_slides(manifest, out, other, workers=1).n_bags == 3
    with pytest.raises(InputError, match="was made with other settings"):  # a cohort that is there is protected
        pack_slides(manifest, out, SETTINGS, workers=1)


def test_reasons_are_counted_whatever_names_and_numbers_are_in_them():
    left_out = [LeftOut(f"b{n}", "", n, f"has no tissue: none of its {n} tiles in '{n}.svs' is") for n in range(7)]
    left_out.append(LeftOut("x", "", 9, "the file is empty"))
    assert frequent_reasons(left_out) == [
        "  7 x has no tissue: none of its 0 tiles in '0.svs' is (such as b0)",
        "  1 x the file is empty (such as x)",
    ]


def test_labels_in_words(tmp_path):
    for name in "abcdef":
        (tmp_path / name).mkdir()
        write_plain(tmp_path / name / "1.tif", draw(32, 32))
    table = tmp_path / "bags.csv"
    rows = [f"{name},{name},{'Tumor' if name in 'ace' else 'normal'}" for name in "abcdef"]
    table.write_text("\n".join(["bag_id,path,label", *rows]))
    with pytest.raises(InputError, match=r"label is 'Tumor', expected 0 or 1; of labels in words.* --positive"):
        read_manifest(table)
    assert read_manifest(table, positive=["tumor"]).bags["label"].tolist() == [1, 0, 1, 0, 1, 0]
    with pytest.raises(InputError, match=r"no label is 'tumour', did you mean 'Tumor'\? \(labels: Tumor, normal\)"):
        read_manifest(table, positive=["tumour"])


def test_the_table_of_clam_is_read_as_it_is(tmp_path):
    features = np.random.default_rng(0).random((4, 8), np.float32)
    coords = np.array([[0, 0], [256, 0], [0, 256], [256, 256]])
    (tmp_path / "features").mkdir()
    rows = []
    for number in range(8):
        trident(tmp_path / "features" / f"slide_{number}.h5", features, coords)
        label = ("normal", "tumor")[number % 2]
        rows.append({"case_id": f"p{number // 2}", "slide_id": f"slide_{number}", "label": label})
    with (tmp_path / "clam.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["case_id", "slide_id", "label"])
        writer.writeheader()
        writer.writerows(rows)
    manifest = read_feature_manifest(tmp_path / "clam.csv", tmp_path / "features", positive=["tumor"])
    assert manifest.bags["group"].tolist() == [f"p{number // 2}" for number in range(8)]
    assert manifest.has_groups
    assert pack_features(manifest, tmp_path / "out").n_bags == 8
    findings = examine(tmp_path / "clam.csv", features=tmp_path / "features", positive=["tumor"])
    assert said(findings, "error") == []
    assert not any("no groups are given" in one for one in said(findings, "warning"))
    assert any("8 files of TRIDENT, 8 features per instance" in one for one in said(findings, "note"))
    (tmp_path / "features" / "slide_3.h5").write_bytes(b"no HDF5")
    findings = examine(tmp_path / "clam.csv", features=tmp_path / "features", positive=["tumor"])
    assert any("row 5" in one and "will be left out" in one for one in said(findings, "warning"))


def test_slides_are_found_by_the_names_of_their_bags(slides):
    slides.write_text("slide_id,case_id,label\ns0,p0,0\ns1.tif,p1,1\n")
    manifest = read_slide_manifest(slides, slides_root=slides.parent / "scans")
    assert [slide.file.name for slide in manifest.slides] == ["s0.tif", "s1.tif"]
    assert manifest.bags["group"].tolist() == ["p0", "p1"]


def test_a_folder_stands_for_bags_without_labels(slides):
    scans = slides.parent / "scans"
    found = slides_of_folder(scans)
    assert found.bags["bag_id"].tolist() == ["s0", "s1", "s2"]
    assert not found.labelled
    with pytest.raises(InputError, match="there are no feature files"):
        features_of_folder(scans)
    images = images_of_folder(scans)
    assert images.bags["bag_id"].tolist() == ["scans"]
    assert Path(images.instances["file"].iloc[0]).name == "s0.tif"
