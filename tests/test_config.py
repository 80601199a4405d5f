import pytest
import yaml

from its2clr.aggregators import create_aggregator
from its2clr.config import RunConfig
from its2clr.errors import InputError
from its2clr.settings import config_difference, read_recipe, recipe_names, recipe_title, resolve_config


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid(name):
    assert isinstance(resolve_config(name), RunConfig)


def test_the_camelyon16_recipe_holds_the_papers_settings():
    config = resolve_config("camelyon16")
    pretrain, refine, aggregator = config.pretrain, config.refine, config.aggregator
    assert (config.encoder.name, config.encoder.norm) == ("resnet18", "instance")
    assert (config.projector.hidden_dim, config.projector.output_dim) == (512, 256)
    assert (pretrain.epochs, pretrain.batch_size, pretrain.temperature) == (600, 512, 0.5)
    assert (pretrain.learning_rate, pretrain.weight_decay, pretrain.schedule) == (0.03, 1e-4, "cosine")
    assert (refine.epochs, refine.batch_size, refine.learning_rate, refine.temperature) == (50, 512, 0.01, 0.07)
    assert (refine.threshold, refine.positive_fraction) == (0.3, 0.2)
    assert (refine.initial_ratio, refine.final_ratio) == (0.2, 0.8)
    assert (refine.warmup_epochs, refine.refresh_every, refine.momentum) == (15, 5, 0.0)
    assert (aggregator.name, aggregator.epochs, aggregator.learning_rate) == ("dsmil", 350, 2e-4)
    assert (aggregator.step_size, aggregator.gamma, aggregator.bags_per_step) == (75, 0.5, 1)
    views = refine.views
    assert (views.jitter_probability, views.grayscale_probability, views.blur_kernel) == (0.8, 0.2, 0.06)
    assert (views.brightness, views.contrast, views.saturation, views.hue) == (0.8, 0.8, 0.8, 0.2)
    assert (views.horizontal_flip, views.vertical_flip, views.crop_scale) == (0.5, 0.5, None)


@pytest.mark.parametrize("name", ["camelyon16", "tcga-luad"])
def test_the_papers_recipes_take_dsmil_as_its_authors_do(name):
    aggregator = resolve_config(name).aggregator
    assert (aggregator.weight_decay, aggregator.betas, aggregator.positive_weight) == (0.005, (0.5, 0.9), 1.0)
    assert create_aggregator(aggregator.name, 512, **aggregator.options).prediction == "mean"


def test_the_recipe_of_the_released_code_differs_in_what_its_head_says():
    released = resolve_config("camelyon16-released")
    assert config_difference(resolve_config("camelyon16"), released) == [
        "aggregator.betas: [0.5, 0.9] -> [0.9, 0.999]",
        "aggregator.options: {} -> None",
        "aggregator.options.prediction: None -> 'embedding'",
        "aggregator.positive_weight: 1.0 -> 'balanced'",
        "aggregator.weight_decay: 0.005 -> 0.0001",
        "refine.constant_epochs: 0 -> 10",
    ]
    assert create_aggregator("dsmil", 512, **released.aggregator.options).prediction == "embedding"


@pytest.mark.parametrize("name", ["tcga-luad", "breast-ultrasound"])
def test_the_other_datasets_train_the_encoder_as_camelyon16(name):
    config, camelyon = resolve_config(name), resolve_config("camelyon16")
    assert (config.encoder, config.projector) == (camelyon.encoder, camelyon.projector)
    assert config.pretrain.model_copy(update={"epochs": 600}) == camelyon.pretrain
    assert config.refine == camelyon.refine
    assert config.evaluation == camelyon.evaluation


def test_the_tcga_luad_recipe_holds_the_papers_settings():
    config = resolve_config("tcga-luad")
    aggregator = config.aggregator
    assert config.pretrain.epochs == 600
    assert (aggregator.name, aggregator.epochs, aggregator.learning_rate) == ("dsmil", 100, 2e-4)
    assert (aggregator.scheduler, aggregator.step_size, aggregator.gamma) == ("step", 50, 0.5)
    assert aggregator.balanced


def test_the_breast_ultrasound_recipe_holds_the_papers_settings():
    config = resolve_config("breast-ultrasound")
    aggregator = config.aggregator
    assert config.pretrain.epochs == 100
    assert (aggregator.name, aggregator.epochs, aggregator.learning_rate) == ("instance_attention", 350, 1e-3)
    assert (aggregator.options, aggregator.balanced) == ({"hidden_dim": 512}, False)
    create_aggregator(aggregator.name, 512, **aggregator.options)


def test_overrides_as_text_and_as_mapping():
    config = resolve_config("demo", ["refine.epochs=7", "refine.views.crop_scale=[0.5, 1.0]", "aggregator.name=max"])
    assert (config.refine.epochs, config.refine.views.crop_scale, config.aggregator.name) == (7, (0.5, 1.0), "max")
    assert resolve_config("demo", {"refine.epochs": 7}).refine.epochs == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["refine.epoch=7"], "refine.epoch: unknown key, did you mean 'epochs'"),
        (["refine.views.brightnes=0.1"], "did you mean 'brightness'"),
        (["refin.epochs=7"], "did you mean 'refine'"),
        (["retraining=3"], "retraining: unknown key, did you mean 'evaluation.retrainings'"),
        (["refine.retrainings=3"], "did you mean 'evaluation.retrainings'"),
        (["aggregator.learningrate=1"], "did you mean 'learning_rate'"),
        (["refine.threshold=1.5"], "refine.threshold"),
        (["refine.epochs=many"], "refine.epochs"),
        (["refine.warmup_epochs=60"], "larger than epochs"),
        (["refine.constant_epochs=60"], "constant_epochs (60) is larger than epochs (50)".replace(")", r"\)")),
        (["aggregator.positive_weight=0"], "aggregator.positive_weight: Input should be greater than 0"),
        (["aggregator.positive_weight=equal"], "aggregator.positive_weight: Input should be 'balanced'"),
        (["aggregator.positive_weight=balanced", "aggregator.balanced=true"], "twice; set one of them"),
        (["refine.views.crop_scale=[0.9, 0.1]"], "crop_scale"),
        (["refine.epochs"], "expected key=value"),
        (["seed.x=1"], "seed is a single value"),
        (["refine.epochs=[1"], "not valid YAML"),
    ],
)
def test_a_wrong_setting_is_named(overrides, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        resolve_config(None, overrides if "seed.x" not in overrides[0] else ["seed=1", *overrides])


def test_an_unknown_recipe_names_the_closest():
    with pytest.raises(InputError, match="did you mean 'demo'"):
        read_recipe("demos")


def test_a_recipe_file_of_the_users(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"refine": {"epochs": 3, "warmup_epochs": 0}}))
    assert resolve_config(path).refine.epochs == 3
    path.write_text("- a\n- b\n")
    with pytest.raises(InputError, match="expected keys and values"):
        resolve_config(path)


def test_a_config_survives_its_yaml():
    config = resolve_config("demo")
    assert RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_difference_names_keys_but_not_the_device():
    config = resolve_config("demo")
    other = resolve_config("demo", ["refine.epochs=3", "engine.accelerator=cpu"])
    assert config_difference(config, other) == [f"refine.epochs: {config.refine.epochs} -> 3"]


def test_every_recipe_says_what_it_is_for():
    titles = {name: recipe_title(name) for name in recipe_names()}
    assert titles["standard"] == "Settings for a cohort that nobody tuned for"
    assert titles["features"].endswith("refined through a residual adapter in minutes on a CPU")
    assert all(10 < len(title) < 130 and "\n" not in title for title in titles.values())
