import json
import math

from typer.testing import CliRunner

from its2clr.bench.measure import SIZES
from its2clr.bench.report import ratios, run_benchmarks
from its2clr.cli import app


def test_everything_is_measured():
    found = run_benchmarks("tiny", {"accelerator": "cpu"})
    assert json.dumps(found)
    assert found["hardware"]["precision"] == "32-true"
    assert all(value > 0 for name, value in found["rates"].items() if "compiled" not in name)
    assert all(0 < value < math.inf for value in found["ratios"].values())


def test_the_limit_is_the_compiled_step_where_there_is_one():
    rates = dict.fromkeys(["refinement epoch", "views", "extraction", "bare inference", "bare training"], 1.0)
    rates |= {"SimCLR epoch": 8.0, "common way (DataLoader, torchvision)": 2.0}
    aggregators = {"plain loop": 10.0, "1 seed": 1.0, "5 seeds": 1.5}
    compiled = ratios({**rates, "bare training, compiled": 10.0}, aggregators)
    assert compiled["SimCLR epoch / bare training step"] == 0.8
    assert compiled["SimCLR epoch / common way"] == 4.0
    assert compiled["plain aggregator loop / ours, one seed"] == 10.0
    eager = ratios({**rates, "bare training, compiled": math.nan}, aggregators)
    assert eager["SimCLR epoch / bare training step"] == 8.0


def test_the_command_prints_and_keeps_the_ratios(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "small", SIZES["tiny"])
    result = CliRunner().invoke(app, ["bench", "--size", "small", "--out", str(tmp_path / "bench.json")])
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert all(name in result.output for name in kept["ratios"])
