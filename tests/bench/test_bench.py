import json
import math
from dataclasses import replace

from typer.testing import CliRunner

from its2clr.bench import recipes
from its2clr.bench.measure import COMMON_WAYS, SIZES, Bench
from its2clr.bench.recipes import FASTEST, LIMITS, measure_recipes, paper_hours, recipe_configs, recipe_ratios
from its2clr.bench.report import joined, ratios, recipe_rows, run_benchmarks
from its2clr.cli import app
from its2clr.config import EngineConfig
from its2clr.engine.devices import Engine
from its2clr.settings import recipe_names, resolve_config

SMALL = ["engine.accelerator=cpu", "encoder.options={channels: [8, 8, 16, 16], stem_width: 8}"]
SETTINGS = [part for setting in SMALL for part in ("--set", setting)]


def test_everything_is_measured():
    found = run_benchmarks("tiny", resolve_config(None, SMALL), recipes=recipe_configs(["standard"], SMALL))
    assert json.dumps(found)
    assert found["hardware"]["precision"] == "32-true"
    for kind in ("images_per_second", "views_per_second", "aggregator_seconds_per_epoch", "update_seconds", "ratios"):
        assert all(0 < value < math.inf for value in found[kind].values())
    assert [len(seconds) for seconds in found["scaling_seconds"].values()] == [4, 4, 4]
    assert found["agreement_of_loss"]["difference"] == 0  # one way on a CPU
    assert all(0 < value < math.inf for value in found["ratios_of_recipes"]["standard"].values())
    assert [row[:2] for row in recipe_rows(found)] == [("standard", stage) for stage in LIMITS]


def test_the_limit_is_the_compiled_step_where_there_is_one():
    rates = dict.fromkeys(["refinement epoch", "extraction", "bare inference", "bare training"], 1.0)
    rates |= {"SimCLR epoch": 8.0, **dict.fromkeys(COMMON_WAYS, 2.0)}
    found = {
        "images_per_second": rates,
        "views_per_second": {"ours": 50.0, "kornia": 5.0},
        "aggregator_seconds_per_epoch": {"plain loop": 10.0, "1 seed": 1.0, "5 seeds": 1.5},
    }
    assert ratios(found)["SimCLR epoch / bare training step"] == 8.0
    rates["bare training, compiled"] = 10.0
    compiled = ratios(found)
    assert compiled["SimCLR epoch / bare training step"] == 0.8
    assert compiled["SimCLR epoch / common way, tiles already decoded"] == 4.0
    assert compiled["views / kornia"] == 10.0
    assert compiled["plain aggregator loop / ours, one seed"] == 10.0
    assert compiled["ours, five seeds / one seed"] == 1.5


def test_the_command_prints_and_keeps_the_ratios(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "small", SIZES["tiny"])
    result = CliRunner().invoke(
        app, ["bench", "--size", "small", "--out", str(tmp_path / "bench.json"), "--recipe", "camelyon16", *SETTINGS]
    )
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert all(name in result.output for name in kept["ratios"])
    assert "camelyon16" in result.output
    assert "as in the paper, pretraining" in result.output
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_one_group_joins_what_was_measured_before(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "small", SIZES["tiny"])
    out = tmp_path / "bench.json"
    run = lambda *more: CliRunner().invoke(app, ["bench", "--size", "small", "--out", str(out), *more, *SETTINGS])  # noqa: E731
    assert "for features" in str(run("--only", "recipes", "--recipe", "features").exception)
    assert not out.exists()
    assert run("--only", "aggregators").exit_code == 0
    first = json.loads(out.read_text())
    assert "images_per_second" not in first
    assert run("--only", "agreement").exit_code == 0
    second = json.loads(out.read_text())
    assert second["agreement_of_loss"]
    assert second["ratios"] == first["ratios"] != {}
    assert "--only" in run("--only", "views").output
    out.write_text(json.dumps(second | {"size": "full"}))
    assert "another size" in str(run("--only", "agreement").exception)


def test_recipes_are_measured_with_their_own_settings_and_beside_batch_norm(monkeypatch):
    """What two recipes have in common is measured once; every network, batch and view is that of the recipe."""
    calls = []

    def measured(kind):
        def work(bench):
            calls.append((kind, bench.config.encoder.norm, bench.size.batch, bench.size.side))
            return float(len(calls))

        work.__name__ = kind
        return work

    for kind in ("_bare_training", "_pretraining", "_refinement"):
        monkeypatch.setattr(recipes, kind, measured(kind))
    for kind in ("bare_inference", "extraction_from_store"):
        monkeypatch.setattr(Bench, kind, measured(kind))
    engine = Engine(EngineConfig(accelerator="cpu"))
    size = replace(SIZES["tiny"], recipe_tiles=1200)
    chosen = recipe_configs(["camelyon16", "camelyon16-released", "demo"], [])
    found = measure_recipes(Bench(size, engine), chosen)
    of_camelyon = [call for call in calls if call[2] == 512]
    assert sorted(of_camelyon) == sorted(
        [(kind, "instance", 512, 64) for kind in
         ("_bare_training", "_pretraining", "_refinement", "bare_inference", "extraction_from_store")]
        + [(kind, "batch", 512, 64) for kind in ("_bare_training", "bare_inference")]
    )  # fmt: skip
    assert [call for call in calls if call[2] != 512] == [
        (kind, "batch", 128, 64) for kind in
        ("_bare_training", "_pretraining", "_refinement", "bare_inference", "extraction_from_store")
    ]  # fmt: skip
    first, second, third = found.values()
    assert first == second
    rates = third["images_per_second"]
    assert rates["bare training"] == rates[f"bare training{FASTEST}"]  # it has batch norm


def test_ratios_and_hours_of_recipes():
    rates = {"bare training": 10.0, f"bare training{FASTEST}": 20.0, "pretraining epoch": 5.0, "refinement epoch": 8.0}
    rates |= {"bare inference": 100.0, f"bare inference{FASTEST}": 400.0, "extraction": 50.0}
    found = {"camelyon16": {"images_per_second": rates}}
    assert list(recipe_ratios(found)["camelyon16"].values()) == [0.5, 0.25, 0.8, 0.4, 0.5, 0.125]
    hours = paper_hours(found, 3600.0)
    assert hours["pretraining"] == {"projected": 600 * 500_000 / 5 / 3600, "paper": 90}
    assert hours["refinement"] == {"projected": 50 * 500_000 / 8 / 3600, "paper": 10}
    assert hours["one update"] == {"projected": 250_000 / 50 / 3600 + 1, "paper": 1 / 6}
    assert "one update" not in paper_hours(found, None)


def test_a_recipe_joins_those_measured_before():
    same = {"its2clr": "1", "hardware": {}, "size": "full"}
    rates = dict.fromkeys([f"{limit}{suffix}" for limit in LIMITS.values() for suffix in ("", FASTEST)], 1.0)
    of = lambda rate: {"images_per_second": rates | dict.fromkeys(LIMITS, rate)}  # noqa: E731
    found = joined({**same, "recipes": {"demo": of(2.0), "standard": of(3.0)}}, {**same, "recipes": {"demo": of(4.0)}})
    assert {name: set(shares.values()) for name, shares in found["ratios_of_recipes"].items()} == {
        "demo": {4.0},
        "standard": {3.0},
    }


def test_all_recipes_of_images_are_there_by_default():
    assert list(recipe_configs([], [])) == [name for name in recipe_names() if name != "features"]
