"""What a search may change: keys and values are checked as `--set` checks them, and draws become settings."""

import pytest
import yaml

from its2clr.errors import InputError
from its2clr.files import write_json
from its2clr.settings import resolve_config
from its2clr.tune.judge import judged
from its2clr.tune.space import STRENGTH, Space, default_space, read_space

DEMO = resolve_config("demo")


class Draws:
    """Stands in for Optuna's trial: gives the named values, else the lowest or first."""

    def __init__(self, **given):
        self.given, self.asked = {key.replace("__", "."): value for key, value in given.items()}, {}

    def suggest_float(self, key, low, high, step=None, log=False):
        self.asked[key] = (float, low, high, step, log)
        return self.given.get(key, low)

    def suggest_int(self, key, low, high, step=1, log=False):
        self.asked[key] = (int, low, high, step, log)
        return self.given.get(key, low)

    def suggest_categorical(self, key, choices):
        self.asked[key] = choices
        return self.given.get(key, choices[0])


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "nothing to search"),
        ({"refine.learning_rat": [1, 2]}, "refine.learning_rat: unknown key, did you mean 'learning_rate'"),
        ({"refin.learning_rate": [1, 2]}, "refin: unknown key, did you mean 'refine'"),
        ({"refine.temperature": [0.1, -1]}, "refine.temperature: Input should be greater than 0"),
        ({"refine.threshold": {"low": 0.1, "high": 1.5}}, "refine.threshold: Input should be less than 1"),
        ({"refine.epochs": {"low": 2, "high": 9}}, r"warmup_epochs \(3\) is larger than epochs \(2\)"),
        ({"refine.learning_rate": {"low": 0.1}}, "refine.learning_rate.high: Field required"),
        ({"refine.learning_rate": {"low": 0.1, "high": 0.2, "lgo": True}}, "refine.learning_rate.lgo: Extra inputs"),
        ({"refine.learning_rate": {"low": 0.2, "high": 0.1}}, r"low \(0.2\) must be smaller than high \(0.1\)"),
        ({"refine.learning_rate": {"low": 0, "high": 0.1, "log": True}}, "log needs a low above 0"),
        ({"refine.learning_rate": 0.1}, "expected {low: 0.001, high: 0.3, log: true} or a list"),
        ({"refine.temperature": [0.1, 0.1]}, "expected .* a list of two or more values"),
        ({"seed": [0, 1]}, "seed: not a setting to search"),
        ({"evaluation.retrainings": [1, 2]}, "not a setting to search"),
        ({"refine.labels": ["pseudo", "ground_truth"]}, "refine.labels: not a setting to search"),
        ({"aggregator.options.loss_wait": [1, 2]}, "loss_wait"),
        ({STRENGTH: {"low": -1.0, "high": 1.0}}, "expected factors of 0 or more"),
    ],
)
def test_what_is_wrong_with_a_space_is_said(entries, said):
    with pytest.raises(InputError, match=said):
        Space(entries, DEMO, "mine.yaml")


def test_the_error_names_the_file(tmp_path):
    with pytest.raises(InputError, match=r"mine\.yaml"):
        Space({"refine.epochz": [1, 2]}, DEMO, "mine.yaml")
    for text in ("- 1\n", "{", "3"):
        (tmp_path / "space.yaml").write_text(text)
        with pytest.raises(InputError, match=r"space\.yaml"):
            read_space(tmp_path / "space.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        read_space(tmp_path / "none.yaml")


def test_an_aggregator_that_makes_no_rounds_is_not_searched():
    malaria = resolve_config("malaria-smears")
    with pytest.raises(InputError, match=r"search refine\.reader\.learning_rate"):
        Space({"aggregator.learning_rate": [0.1, 0.2]}, malaria)
    Space({"refine.reader.learning_rate": [0.1, 0.2]}, malaria)


@pytest.mark.parametrize(
    "recipe",
    ["standard", "demo", "camelyon16", "camelyon16-released", "malaria-smears", "tcga-luad", "breast-ultrasound"],
)
def test_the_default_space_holds_the_recipe_and_survives_a_file(recipe):
    config = resolve_config(recipe)
    space = Space(default_space(config), config)
    assert space.recipe_parameters().keys() == set(space)
    assert Space(yaml.safe_load(yaml.safe_dump(space.written())), config).written() == space.written()
    assert space.config(space.recipe()).refine.model_dump(exclude={"reader"}) == config.refine.model_dump(
        exclude={"reader"}
    )


def test_the_default_space_follows_the_recipe():
    assert "refine.threshold" in default_space(DEMO)
    assert default_space(DEMO)["aggregator.options.loss_weight"] == {"low": 0.1, "high": 5.0, "log": True}
    malaria = default_space(resolve_config("malaria-smears"))
    assert "refine.false_positive_rate" in malaria
    assert not {"refine.threshold", "aggregator.options.loss_weight"} & malaria.keys()
    top_k = default_space(resolve_config("demo", {"refine.reader": {"name": "top_k", "options": {"ratio": 0.05}}}))
    assert top_k["refine.reader.options.ratio"] == [0.001, 0.01, 0.03, 0.05, 0.1, 0.2]
    outside = default_space(resolve_config("demo", {"refine.learning_rate": 0.7}))
    assert outside["refine.learning_rate"] == {"low": 0.001, "high": 0.7, "log": True}
    assert default_space(DEMO)["refine.epochs"] == {"low": 9, "high": 30, "step": 3}
    of_features = default_space(resolve_config("features"), "features")
    assert "adapter.feature_noise" in of_features
    assert not any(key.startswith("refine.views") for key in of_features)


def test_draws_become_settings():
    space = Space(
        {
            "refine.learning_rate": {"low": 0.001, "high": 0.3, "log": True},
            "refine.epochs": {"low": 4, "high": 8, "step": 2},
            "refine.temperature": {"low": 1, "high": 2},
            "refine.views.crop_scale": [None, [0.5, 1.0]],
            STRENGTH: {"low": 0.0, "high": 3.0},
        },
        DEMO,
    )
    trial = Draws(refine__learning_rate=0.0123456789, refine__views__crop_scale="[0.5, 1.0]", refine__views__strength=3)
    drawn = space.draw(trial)
    assert trial.asked["refine.learning_rate"] == (float, 0.001, 0.3, None, True)
    assert trial.asked["refine.epochs"] == (int, 4, 8, 2, False)
    assert trial.asked["refine.temperature"][0] is float  # whole numbers in the file, a real number in the settings
    assert drawn["refine.learning_rate"] == 0.01235
    config = space.config(drawn).refine
    assert (config.learning_rate, config.epochs, config.views.crop_scale) == (0.01235, 4, (0.5, 1.0))
    views = config.views
    assert (views.brightness, views.contrast, views.saturation) == (1.0, 1.0, 1.0)  # 3 * 0.4, at most 1
    assert views.hue == pytest.approx(0.3)
    assert space.config({}) == DEMO


def test_ratios_and_warm_up_are_put_in_order():
    space = Space({"refine.initial_ratio": {"low": 0.1, "high": 1.0}, "refine.warmup_epochs": [0, 15]}, DEMO)
    drawn = space.draw(Draws(refine__initial_ratio=0.9, refine__warmup_epochs=15))
    assert drawn["refine.final_ratio"] == 0.9  # the recipe's is 0.8
    assert space.draw(Draws(refine__initial_ratio=0.5)).keys() == {"refine.initial_ratio", "refine.warmup_epochs"}
    both = Space({"refine.epochs": [4, 8], "refine.warmup_epochs": [0, 8]}, DEMO)
    assert both.draw(Draws(refine__warmup_epochs=8))["refine.warmup_epochs"] == 4


def test_a_run_is_judged_by_the_round_whose_encoder_it_keeps(tmp_path):
    assert judged(tmp_path) is None
    for epoch, loss, improved in ((0, 0.5, True), (2, 0.1, False), (6, 0.4, True), (10, 0.3, False)):
        folder = tmp_path / "rounds" / f"{epoch:03d}"
        folder.mkdir(parents=True)
        write_json(folder / "metrics.json", {"validation_loss": loss, "epoch": epoch, "improved": improved})
    assert [judged(tmp_path, up_to) for up_to in (0, 2, 6, 10, None)] == [0.5, 0.5, 0.4, 0.4, 0.4]
