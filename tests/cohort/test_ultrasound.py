"""Finding the scan in an ultrasound image: what is drawn is known, so found and true scan can be compared."""

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw
from scipy import ndimage
from tests.cohort.test_dicom_images import write_dicom
from tests.cohort.ultrasound_images import SIZE, draw, fan, frame, rectangle, speckle

from its2clr.cohort import Cohort, decode, pack_images, read_manifest, read_tiles, tile_path
from its2clr.cohort.image_files import ImageProblem, prepare_image
from its2clr.cohort.packing import FINGERPRINT, file_stamp, fingerprint
from its2clr.cohort.ultrasound import _lower_hull, crop_to_scan, find_scan
from its2clr.errors import InputError

LARGE = (960, 720)
FAN = fan(240, -20, 60, 360, 60)
LINEAR = rectangle(110, 30, 400, 330)
SCANS = {
    "fan": FAN,
    "wide fan": fan(240, 10, 40, 300, 90),
    "fan of a flat probe": fan(230, -200, 230, 530, 40),
    "sector": fan(250, 24, 0, 290, 80),
    "small fan, low": fan(300, 140, 30, 180, 70),
    "large fan": fan(480, -40, 120, 720, 60, LARGE),
    "rectangle": LINEAR,
    "small rectangle": rectangle(180, 60, 330, 250),
    "flat rectangle": rectangle(100, 120, 440, 240),
    "large rectangle": rectangle(220, 60, 900, 660, LARGE),
    "trapezoid": fan(240, -400, 430, 720, 30) & rectangle(0, 30, 480, 330),
}


def overlap(found, scan):
    return (found & scan).sum() / (found | scan).sum()


def find(image):
    found = find_scan(np.asarray(image))
    assert found is not None
    return found


def shows_only_the_scan(image, found, scan):
    """Whether nothing but background was taken for scan, but for a rim of a few pixels."""
    rim = ndimage.binary_dilation(scan, iterations=3)
    return (np.asarray(image)[found & ~rim].max(axis=-1, initial=0) < 6).all()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SCANS)
def test_the_scan_is_found_and_the_frame_goes(name, seed):
    scan = SCANS[name]
    image = draw(scan, seed)
    found = find(image)
    assert overlap(found, scan) >= 0.98
    assert shows_only_the_scan(image, found, scan)
    rows, columns = (np.flatnonzero(found.any(axis=axis)) for axis in (1, 0))
    box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    np.testing.assert_array_equal(crop_to_scan(image), np.where(found[..., None], image, 0)[box])


@pytest.mark.parametrize(
    ("scan", "hole"),
    [
        (FAN, (260, 200, 40, 40)),
        (FAN, (260, 340, 50, 90)),
        (FAN, (120, 190, 40, 30)),
        (LINEAR, (250, 330, 70, 200)),
        (LINEAR, (110, 180, 90, 60)),
        (LINEAR, (250, 30, 24, 200)),
    ],
    ids=["inside", "at the depth of a fan", "at its side", "at the depth", "at the side", "at the probe"],
)
def test_dark_parts_belong_to_the_scan(scan, hole):
    assert overlap(find(draw(scan, holes=[hole])), scan) >= 0.97


def jpeg(image, quality=75):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


def smooth(image, scan):
    tissue = ndimage.gaussian_filter(speckle(scan.shape).astype(float), 4)
    return Image.fromarray(np.where(scan[..., None], tissue[..., None].astype(np.uint8), image))


def tinted(image, scan):
    return Image.fromarray((np.asarray(image) * np.array([1.0, 0.7, 0.35])).astype(np.uint8))


def with_flow(image, scan):
    flow = Image.new("RGB", (90, 90), (230, 60, 20))
    image.paste(flow, (200, 160))
    return image


@pytest.mark.parametrize("scan", [FAN, LINEAR], ids=["fan", "rectangle"])
@pytest.mark.parametrize(
    "change", [lambda image, _: jpeg(image), smooth, tinted, with_flow], ids=["jpeg", "smooth", "tinted", "flow"]
)
def test_other_looks(scan, change):
    image = change(draw(scan), scan)
    assert overlap(find(image), scan) >= 0.97


def test_dim_scan_and_grey_frame():
    assert overlap(find(draw(LINEAR, level=25.0)), LINEAR) >= 0.97
    image = draw(FAN, background=60)
    assert overlap(find(image), FAN) >= 0.97
    assert overlap(find(jpeg(image)), FAN) >= 0.97


def test_text_under_the_arc_of_a_probe_goes():
    scan = fan(240, -120, 190, 440, 60)
    image = draw(scan)
    ImageDraw.Draw(image).text((226, 50), "9 MHz", (255, 255, 255))
    assert not (find(image) & ~scan)[48:62, 220:260].any()


def test_what_touches_the_scan_goes():
    image = draw(LINEAR)
    drawing = ImageDraw.Draw(image)
    drawing.rectangle([400, 200, 455, 210], (210, 210, 210))  # thinner than any scan
    drawing.rectangle([60, 120, 109, 220], (240, 210, 30))  # wide, but coloured
    found = find(image)
    assert overlap(found, LINEAR) >= 0.98
    assert shows_only_the_scan(image, found, LINEAR)


def test_split_screens_keep_both_scans():
    left, right, small = rectangle(100, 40, 260, 320), rectangle(280, 40, 440, 300), rectangle(280, 40, 340, 110)
    assert overlap(find(draw(left | right)), left | right) >= 0.97
    assert overlap(find(draw(left | small)), left) >= 0.97


def test_an_image_without_a_frame_is_left_as_it_is(tmp_path):
    image = Image.fromarray(speckle((300, 400))).convert("RGB")
    assert crop_to_scan(image) is image
    tile = Image.fromarray(speckle((32, 32))).convert("RGB")
    tile.save(tmp_path / "tile.png")
    content = prepare_image(tmp_path / "tile.png", tile_size=32, encoding="png", crop="ultrasound")
    assert content == (tmp_path / "tile.png").read_bytes()


def test_an_image_of_the_right_size_is_cropped_too(tmp_path):
    image = draw(rectangle(90, 40, 210, 240, (256, 256)))
    image.save(tmp_path / "tile.png")
    content = prepare_image(tmp_path / "tile.png", tile_size=256, encoding="png", crop="ultrasound")
    np.testing.assert_array_equal(decode(content), crop_to_scan(image).resize((256, 256), Image.Resampling.BILINEAR))


def test_no_scan(tmp_path):
    for image in (frame(), Image.new("RGB", SIZE), Image.new("RGB", SIZE, (90, 90, 90)), Image.new("RGB", (1, 1))):
        assert crop_to_scan(image) is None
    frame().save(tmp_path / "report.png")
    with pytest.raises(ImageProblem, match="no ultrasound scan was found in it"):
        prepare_image(tmp_path / "report.png", tile_size=32, encoding="png", crop="ultrasound")


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (5, 5)])
def test_tiny_images(size):
    for seed in range(5):
        image = Image.fromarray(np.random.default_rng(seed).integers(20, 250, size, dtype=np.uint8)).convert("RGB")
        crop = crop_to_scan(image)
        assert crop is None or (crop.width <= image.width and crop.height <= image.height)


def test_lower_hull():
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 17):
        for values in (rng.normal(size=length), rng.integers(0, 3, length).astype(float)):
            lines = [
                [
                    values[a] + (values[b] - values[a]) * (x - a) / max(b - a, 1)
                    for a in range(x + 1)
                    for b in range(x, length)
                ]
                for x in range(length)
            ]
            np.testing.assert_allclose(_lower_hull(values), [min(line) for line in lines], atol=1e-12)


@pytest.fixture
def exams(tmp_path):
    """Two exams of images with a frame, in the formats of scanners; the second has a page without a scan."""
    for exam in ("a", "b"):
        (tmp_path / exam).mkdir()
    draw(FAN).save(tmp_path / "a" / "0.png")
    draw(LINEAR).convert("L").save(tmp_path / "a" / "1.png")
    deep = np.asarray(draw(FAN).convert("L")).astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "a" / "2.png")
    write_dicom(tmp_path / "b" / "0.dcm", np.asarray(draw(LINEAR, 1)), "RGB")
    write_dicom(tmp_path / "b" / "1.dcm", np.asarray(draw(FAN, 1).convert("L")), "MONOCHROME2")
    frame().save(tmp_path / "b" / "2.png")
    (tmp_path / "exams.csv").write_text("bag_id,path\na,a\nb,b\n")
    return tmp_path / "exams.csv"


def test_images_of_all_kinds_are_cropped_before_they_are_resized(exams, tmp_path):
    bags = read_manifest(exams, labelled=False)
    summary = pack_images(bags, tmp_path / "out", tile_size=64, encoding="png", crop="ultrasound")
    (problem,) = summary.left_out
    assert (problem.bag_id, problem.file) == ("b", "2.png")
    assert "no ultrasound scan was found" in problem.problem
    drawn = {"a": [draw(FAN), draw(LINEAR), draw(FAN)], "b": [draw(LINEAR, 1), draw(FAN, 1)]}
    grey = {("a", 1), ("a", 2), ("b", 1)}
    for bag_id, images in drawn.items():
        tiles = read_tiles(tile_path(tmp_path / "out", bag_id))
        assert len(tiles) == len(images)
        for number, image in enumerate(images):
            stored = image.convert("L").convert("RGB") if (bag_id, number) in grey else image
            expected = crop_to_scan(stored).resize((64, 64), Image.Resampling.BILINEAR)
            np.testing.assert_array_equal(decode(tiles.encoded(number)), expected)
    assert Cohort.open(tmp_path / "out").info.settings["crop"] == "ultrasound"
    with pytest.raises(InputError, match="crop: ultrasound there, not set asked for"):
        pack_images(bags, tmp_path / "out", tile_size=64, encoding="png")


def test_cohorts_without_the_setting_stay_as_they_were(exams, tmp_path):
    bags = read_manifest(exams, labelled=False)
    pack_images(bags, tmp_path / "out", tile_size=32, encoding="png")
    assert "crop" not in Cohort.open(tmp_path / "out").info.settings
    files = sorted((tmp_path / "a").iterdir())
    settings = {"tile_size": 32, "encoding": "png", "quality": 95, "resize": "bilinear"}
    made_from = fingerprint(settings, "a", [file.name for file in files], None, [file_stamp(file) for file in files])
    assert read_tiles(tile_path(tmp_path / "out", "a")).attributes[FINGERPRINT] == made_from
    with pytest.raises(InputError, match="crop must be one of ultrasound"):
        pack_images(bags, tmp_path / "other", tile_size=32, crop="fan")
