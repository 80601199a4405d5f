"""The synthetic cohort: reproducible, truthful labels, and no shortcut from colour to the bag label."""

import numpy as np
import pandas as pd
import pytest
from scipy import ndimage
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from its2clr.cohort import Cohort
from its2clr.cohort.synthetic.drawing import (
    TISSUE_NAMES,
    TUMOUR,
    TissueSettings,
    choose_focus_tiles,
    render_slide,
    smooth_noise,
)
from its2clr.cohort.synthetic.synthetic_cohort import (
    SIZES,
    _plan_bags,
    cut_tiles,
    make_synthetic,
    slide_generator,
    synthetic_settings,
)
from its2clr.cohort.tiles import decode, read_tiles
from its2clr.errors import InputError

SMALL = TissueSettings(grid=(5, 6))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cohort") / "tiny"
    make_synthetic(folder, size="tiny", seed=3, workers=1)
    return folder


@pytest.fixture(scope="module")
def slides():
    """Sixty slides, every other one positive."""
    return [render_slide(slide_generator(11, number), TissueSettings(), number % 2 == 1) for number in range(60)]


def test_same_generator_same_slide_other_number_other_slide():
    first, again, other = (render_slide(slide_generator(5, number), SMALL, True) for number in (2, 2, 3))
    assert np.array_equal(first.image, again.image)
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.image, other.image)


def test_slide_has_the_shape_of_its_grid():
    slide = render_slide(slide_generator(0, 0), SMALL, True)
    assert slide.image.shape == (5 * 32, 6 * 32, 3)
    assert slide.image.dtype == np.uint8
    assert slide.labels.shape == (5, 6)
    assert slide.tissue.shape == (5 * 32, 6 * 32)


def test_structures_keep_their_size_in_microns():
    """Half the microns per pixel: twice the pixels, and about as much of everything in the picture."""
    coarse = [render_slide(slide_generator(1, i), TissueSettings(), False).image for i in range(3)]
    fine_settings = TissueSettings(tile_size=64, mpp=0.5)
    fine = [render_slide(slide_generator(1, i), fine_settings, False).image for i in range(3)]
    assert fine[0].shape == (448, 448, 3)
    nuclei = [sum(ndimage.label(np.asarray(image)[..., 0] < 120)[1] for image in some) for some in (coarse, fine)]
    assert nuclei[1] == pytest.approx(nuclei[0], rel=0.35)


def test_labels_are_the_tiles_that_are_mostly_tumour(slides):
    for slide in slides:
        tumour = cut_tiles(np.repeat((slide.tissue == TUMOUR)[..., None], 3, axis=2), 32).mean(axis=(1, 2, 3))
        assert np.array_equal(tumour >= 0.5, slide.labels.ravel() == 1)
        # Tumour follows the borders of the tiles: none is half and half.
        assert np.all((tumour > 0.85) | (tumour < 0.1))


def test_positive_slides_hold_few_compact_regions_and_negative_slides_none(slides):
    for number, slide in enumerate(slides):
        _, regions = ndimage.label(slide.labels)
        assert (1 <= regions <= 3) if number % 2 else regions == 0
        assert slide.labels.mean() <= 0.27


def test_every_negative_tissue_occurs(slides):
    seen = np.bincount(np.concatenate([slide.tissue.ravel() for slide in slides]), minlength=len(TISSUE_NAMES))
    assert np.all(seen[:TUMOUR] / seen.sum() > 0.04)


@pytest.mark.parametrize(("grid", "rate"), [((7, 7), 0.1), ((7, 7), 0.25), ((14, 14), 0.1), ((4, 4), 0.1)])
def test_witness_rate_is_the_mean_share_of_choose_focus_tiles(grid, rate):
    settings = TissueSettings(grid=grid, witness_rate=rate)
    rng = np.random.default_rng(0)
    shares = np.array([choose_focus_tiles(rng, settings).mean() for _ in range(600)])
    assert shares.mean() == pytest.approx(rate, rel=0.07)
    assert shares.min() >= 1 / np.prod(grid)
    assert shares.std() > 0.2 * rate


def test_a_witness_rate_below_one_tile_gives_one_tile():
    settings = TissueSettings(grid=(4, 4), witness_rate=0.01)
    rng = np.random.default_rng(0)
    assert {int(choose_focus_tiles(rng, settings).sum()) for _ in range(50)} == {1}


def test_without_evidence_a_positive_slide_is_the_negative_one():
    """The one difference between the classes is the nuclei of the foci; nothing else can tell the bag label."""
    settings = SMALL.model_copy(update={"evidence": 0.0})
    for number in range(4):
        positive, negative = (render_slide(slide_generator(8, number), settings, label) for label in (True, False))
        assert np.array_equal(positive.image, negative.image)
        assert positive.labels.any()
        assert not negative.labels.any()


def test_positive_and_negative_slide_are_equal_away_from_tumour():
    for number in range(4):
        positive, negative = (render_slide(slide_generator(8, number), SMALL, label) for label in (True, False))
        tumour = positive.tissue == TUMOUR
        away = ~ndimage.binary_dilation(tumour, iterations=20)
        assert away.any()
        assert np.array_equal(positive.image[away], negative.image[away])
        assert np.any(positive.image[tumour] != negative.image[tumour], axis=1).mean() > 0.5


def test_stain_variation_zero_gives_every_slide_the_same_stain():
    def pink(variation: float) -> np.ndarray:
        settings = TissueSettings(grid=(3, 3), stain_variation=variation)
        images = [render_slide(slide_generator(4, number), settings, False) for number in range(16)]
        return np.array([np.median(s.image[s.tissue == 0], axis=0) for s in images if (s.tissue == 0).sum() > 800])

    assert pink(1.0).std(axis=0).mean() > 2 * pink(0.0).std(axis=0).mean()


def test_evidence_moves_tumour_away_from_reactive_tissue():
    """With no evidence tumour nuclei are drawn as reactive ones are; with more the picture differs more."""

    def texture(evidence: float) -> float:
        settings = TissueSettings(grid=(4, 4), witness_rate=0.5, evidence=evidence, stain_variation=0)
        slides = [render_slide(slide_generator(9, number), settings, True) for number in range(8)]
        return float(np.mean([(s.image[..., 0][s.tissue == TUMOUR] < 105).mean() for s in slides]))

    low, middle, high = texture(0.0), texture(0.5), texture(1.0)
    assert low < middle < high


def test_smooth_noise_has_unit_variance_and_is_smooth():
    rng = np.random.default_rng(0)
    fields = np.stack([smooth_noise(rng, (40, 60), 6.0) for _ in range(400)])
    assert fields.shape == (400, 40, 60)
    assert fields.var(axis=0).min() > 0.7
    assert fields.var(axis=0).max() < 1.4
    step = np.abs(np.diff(fields, axis=2)).mean()
    assert step < 0.25


def test_colour_does_not_tell_the_bag(slides):
    tiles = np.stack([cut_tiles(slide.image, 32) for slide in slides]) / 255.0  # (60, 49, 32, 32, 3)
    colours = np.concatenate([tiles.mean(axis=(2, 3)), tiles.std(axis=(2, 3))], axis=2)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))

    bag_labels = np.arange(60) % 2
    mean_colour = colours[..., :3].mean(axis=1)
    scores = cross_val_predict(model, mean_colour, bag_labels, cv=10, method="predict_proba")[:, 1]
    assert roc_auc_score(bag_labels, scores) < 0.7  # two standard errors above chance for 60 bags


def test_cut_tiles_goes_row_by_row():
    image = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    tiles = cut_tiles(image, 2)
    assert tiles.shape == (6, 2, 2, 3)
    assert np.array_equal(tiles[1], image[:2, 2:4])
    assert np.array_equal(tiles[5], image[2:, 4:])


def test_cohort_opens_with_truth_in_place(tiny):
    cohort = Cohort.open(tiny)
    assert len(cohort) == 56
    assert cohort.tile_size == 32
    assert cohort.info.has_instance_labels
    settings = synthetic_settings("tiny")
    for number in (0, 1, 30, 55):
        row = cohort.bags.iloc[number]
        slide = render_slide(slide_generator(3, number), settings, bool(row["label"]))
        tiles = read_tiles(tiny / "tiles" / f"{row['bag_id']}.h5")
        assert np.array_equal(tiles.labels, slide.labels.ravel())
        assert tiles.names[5] == "r01c01"
        for index in (0, 5, 14):
            x, y = tiles.coords[index]
            assert np.array_equal(np.asarray(decode(tiles.encoded(index))), slide.image[y : y + 32, x : x + 32])
    assert pd.read_csv(tiny / "problems.csv").empty


def test_bag_labels_agree_with_instance_labels(tiny):
    bags = pd.read_csv(tiny / "bags.csv")
    for bag_id, label, count in bags[["bag_id", "label", "n_instances"]].itertuples(index=False):
        labels = read_tiles(tiny / "tiles" / f"{bag_id}.h5").labels
        assert len(labels) == count == 16
        assert labels.max() == label


@pytest.mark.parametrize("name", SIZES)
def test_splits_hold_both_classes_evenly_and_share_no_patient(name):
    size = SIZES[name]
    bags = pd.DataFrame(_plan_bags(size, seed=3))
    assert bags["bag_id"].is_unique
    assert bags["split"].value_counts().to_dict() == {"train": size.train, "val": size.val, "test": size.test}
    assert (bags.groupby("split")["label"].mean() == 0.5).all()
    for _, slides_of_patient in bags.groupby("group"):
        assert len(slides_of_patient[["split", "label"]].drop_duplicates()) == 1
    per_patient = bags["group"].value_counts()
    assert set(per_patient) == {1, 2}
    assert 0.05 < (per_patient == 2).mean() < 0.2


def test_workers_do_not_matter(tiny, tmp_path):
    make_synthetic(tmp_path / "pool", size="tiny", seed=3, workers=2)
    assert (tmp_path / "pool" / "bags.csv").read_bytes() == (tiny / "bags.csv").read_bytes()
    for path in sorted((tiny / "tiles").iterdir()):
        one, two = read_tiles(path), read_tiles(tmp_path / "pool" / "tiles" / path.name)
        assert all(one.encoded(index) == two.encoded(index) for index in range(len(one)))
        assert np.array_equal(one.labels, two.labels)


def test_running_again_draws_only_what_is_missing(tiny):
    before = {path.name: path.stat().st_mtime_ns for path in tiny.rglob("*") if path.is_file()}
    assert make_synthetic(tiny, size="tiny", seed=3).drawn == 0
    assert {path.name: path.stat().st_mtime_ns for path in tiny.rglob("*") if path.is_file()} == before

    lost = tiny / "tiles" / "slide_007.h5"
    first = [read_tiles(lost).encoded(index) for index in range(16)]
    lost.unlink()
    steps = []
    summary = make_synthetic(tiny, size="tiny", seed=3, progress=lambda done, total: steps.append((done, total)))
    assert summary.drawn == 1
    assert (summary.bags, summary.positive_bags, summary.instances) == (56, 28, 56 * 16)
    assert steps == [(55, 56), (56, 56)]
    assert [read_tiles(lost).encoded(index) for index in range(16)] == first


def test_other_settings_in_the_same_folder_are_refused_with_the_difference(tiny):
    with pytest.raises(InputError, match=r"(?s)seed: 3 there, 4 asked for.*evidence: 0\.95 there, 0\.5 asked for"):
        make_synthetic(tiny, size="tiny", seed=4, evidence=0.5)


def test_a_folder_with_another_cohort_is_refused(tmp_path):
    (tmp_path / "bags.csv").write_text("bag_id,label,split,group\n")
    with pytest.raises(InputError, match="holds other files"):
        make_synthetic(tmp_path, size="tiny")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "tiny, small, medium, large"),
        ({"evidnce": 0.5}, "did you mean 'evidence'"),
        ({"evidence": 1.5}, "evidence: .*less than or equal to 1"),
        ({"grid": (1, 1)}, "at least two tiles"),
        ({"tile_size": 16, "mpp": 0.25}, "4 microns wide"),
        ({"workers": 0}, "workers must be at least 1"),
    ],
)
def test_bad_arguments_are_explained(tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        make_synthetic(tmp_path / "cohort", **{"size": "tiny", **arguments})
    assert not (tmp_path / "cohort").exists()
