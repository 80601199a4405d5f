"""What docs/results-real.md says is what the committed scripts make of the committed results."""

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield
    for name in ("malaria", "malaria_page"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("benchmarks")
def test_the_page_is_made_of_the_results(tmp_path):
    from malaria_page import main

    shutil.copytree(ROOT / "docs" / "results-real", tmp_path / "results-real")
    main(tmp_path, None)
    assert (tmp_path / "results-real.md").read_text() == (ROOT / "docs" / "results-real.md").read_text()


@pytest.mark.usefixtures("benchmarks")
def test_rows_of_the_tables_can_be_trained_again_by_their_names():
    from malaria import KNOWN, as_settings

    for name in ("malaria", "malaria_validation"):
        found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        gone = {run["row"] for run in found["runs"]} - KNOWN.keys()
        assert all("tolerance" in row or "selection" in row for row in gone)  # settings that exist no more
    recipe = as_settings("malaria-smears", {})
    for row, changes in KNOWN.items():
        assert (as_settings("malaria-smears", changes) == recipe) == (row in {"SimCLR", "ItS2CLR"}), row
