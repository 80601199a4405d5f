import json
import math

from typer.testing import CliRunner

from its2clr.bench.measure import COMMON_WAYS, SIZES
from its2clr.bench.report import ratios, run_benchmarks
from its2clr.cli import app
from its2clr.settings import resolve_config

SMALL = ["engine.accelerator=cpu", "encoder.options={channels: [8, 8, 16, 16], stem_width: 8}"]
SETTINGS = [part for setting in SMALL for part in ("--set", setting)]


def test_everything_is_measured():
    found = run_benchmarks("tiny", resolve_config(None, SMALL))
    assert json.dumps(found)
    assert found["hardware"]["precision"] == "32-true"
    for kind in ("images_per_second", "views_per_second", "aggregator_seconds_per_epoch", "update_seconds", "ratios"):
        assert all(0 < value < math.inf for value in found[kind].values())
    assert [len(seconds) for seconds in found["scaling_seconds"].values()] == [4, 4, 4]
    assert found["agreement_of_loss"]["difference"] == 0  # one way on a CPU


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
    result = CliRunner().invoke(app, ["bench", "--size", "small", "--out", str(tmp_path / "bench.json"), *SETTINGS])
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert all(name in result.output for name in kept["ratios"])
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_one_group_joins_what_was_measured_before(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "small", SIZES["tiny"])
    out = tmp_path / "bench.json"
    run = lambda *more: CliRunner().invoke(app, ["bench", "--size", "small", "--out", str(out), *more, *SETTINGS])  # noqa: E731
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
