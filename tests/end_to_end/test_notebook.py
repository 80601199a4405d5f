"""The tutorial notebook: its real cells, in order, on the tiny cohort."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from tests.conftest import TINY

NOTEBOOK = Path(__file__).parents[2] / "docs" / "guide" / "notebook.ipynb"
SHORT = {
    "aggregator.epochs": 2,
    "refine.epochs": 1,
    "refine.warmup_epochs": 1,
    "refine.reader.epochs": 2,
    "evaluation": {"retrainings": 1, "bootstrap": 10},
}


def run_cell(source: str, names: dict) -> object:
    """What Jupyter does with a cell: run it, and show its last expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.mark.slow
def test_its_cells_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in TINY)}
    names, shown = {"__name__": "__main__"}, []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            shown.append(run_cell("".join(cell["source"]), names))
        if "parameters" in cell["metadata"].get("tags", []):
            assert names["SIZE"] == "small"
            names |= {"SIZE": "tiny", "SETTINGS": settings, "FOLD_SETTINGS": SHORT}
    assert len(names["scores"]) == 16
    assert sum(isinstance(one, Image.Image) for one in shown) == 3  # maps, tiles, the new slide
    assert Path("runs/demo/report.html").is_file()
    assert len(list(Path("runs/demo/geojson").iterdir())) == 3
    # the slide made of a test slide's tiles has its score
    of_slide = names["scores"].set_index("bag_id")["probability"][names["suspicious"][0]]
    assert names["predicted"].bags["probability"].tolist() == [of_slide]
    assert shown[-1].shape == (3,)
    assert np.isfinite(shown[-1]).all()
