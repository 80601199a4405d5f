"""Real cells, when they are there: a folder `malaria-smears` beside the project, or named by the environment."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score
from tests.end_to_end.commands import ROOT, its2clr, tiny_settings

DATA = Path(os.environ.get("ITS2CLR_MALARIA", ROOT.parent / "shared" / "data" / "malaria-smears"))


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "cells.zip").is_file(), reason="the malaria cells are not on this machine")
def test_fit_on_real_bags_from_zip_to_results(tmp_path):
    with zipfile.ZipFile(DATA / "cells.zip") as archive:
        archive.extractall(tmp_path / "cells")
    subprocess.run([sys.executable, DATA / "make_bags.py", tmp_path / "cells", tmp_path / "bags"], check=True)
    bags = pd.read_csv(tmp_path / "bags" / "bags.csv")
    few = bags.groupby(["split", "label"]).head(6)
    instances = pd.read_csv(tmp_path / "bags" / "instances.csv")
    few.to_csv(tmp_path / "few.csv", index=False)
    instances[instances["bag_id"].isin(few["bag_id"])].to_csv(tmp_path / "few-instances.csv", index=False)

    options = ["--instances", tmp_path / "few-instances.csv", "--images-root", tmp_path / "cells", "--tile-size", 32]
    its2clr("cohort", "images", tmp_path / "few.csv", tmp_path / "cohort", *options)
    assert "0 errors" in its2clr("doctor", tmp_path / "cohort").stdout
    its2clr("fit", tmp_path / "cohort", "--out", tmp_path / "run", *tiny_settings())
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["cohort"]["splits"]["test"]["bags"] == 12
    for encoder in ("start", "refined"):
        assert 0 <= results[encoder]["test"]["bag_auc"] <= 1
        assert 0 <= results[encoder]["test"]["instance_auc"] <= 1

    new = few[few["split"] == "test"]
    new.to_csv(tmp_path / "new.csv", index=False)
    instances[instances["bag_id"].isin(new["bag_id"])].to_csv(tmp_path / "new-instances.csv", index=False)
    options = ["--instances", tmp_path / "new-instances.csv", *options[2:]]
    its2clr("cohort", "images", tmp_path / "new.csv", tmp_path / "new", "--unlabelled", *options)
    its2clr("predict", tmp_path / "run" / "model.its2clr", tmp_path / "new", "--out", tmp_path / "predictions")
    its2clr("score", tmp_path / "predictions", tmp_path / "new.csv", *options[:2])
    scores = json.loads((tmp_path / "predictions" / "scores.json").read_text())
    tested = pd.read_csv(tmp_path / "run" / "bag_predictions.csv").query("split == 'test' and encoder == 'refined'")
    assert scores["bags"]["scored"] == 12
    assert scores["bag"]["auc"] == pytest.approx(roc_auc_score(tested["label"], tested["probability"]))
    assert scores["instances"]["without_label"] == 0
