"""The pages on public datasets: their scripts run on what a download looks like, their commands have these options."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from PIL import Image

from its2clr.cli import app
from its2clr.cohort import read_manifest
from its2clr.cohort.slides import read_slide_manifest
from its2clr.settings import resolve_config

PAGES = Path(__file__).parents[2] / "docs" / "datasets"


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)


def run_script(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (script,) = blocks(page, "python")
    exec(compile(script, page, "exec"), {})


def commands(page):
    """The words of every its2clr command of a page, loops written out for one gene."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ").replace("$gene", "EGFR")
    return [shlex.split(line)[1:] for line in map(str.strip, text.splitlines()) if line.startswith("its2clr ")]


@pytest.mark.parametrize("page", ["camelyon16", "tcga-luad", "breast-ultrasound"])
def test_commands_can_be_given(page):
    root = typer.main.get_command(app)
    found = commands(page)
    assert {words[0] for words in found} == {"cohort", "doctor", "fit"}
    for words in found:
        command, context = root, root.make_context("refined", [], resilient_parsing=True)
        rest = list(words)
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        command.make_context(" ".join(words), rest, parent=context)  # raises at an option that does not exist


@pytest.mark.parametrize("page", ["camelyon16", "tcga-luad", "breast-ultrasound"])
def test_the_recipe_takes_the_settings_of_the_page(page):
    for words in commands(page):
        if words[0] == "fit":
            settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
            resolve_config(words[words.index("--recipe") + 1], settings)


def test_camelyon16_manifest(tmp_path, monkeypatch):
    for folder in ("slides", "annotations/train"):
        (tmp_path / folder).mkdir(parents=True)
    names = [f"normal_{n:03d}" for n in range(10)] + [f"tumor_{n:03d}" for n in range(10)]
    names += [f"test_{n:03d}" for n in range(6)]
    for name in names:
        (tmp_path / "slides" / f"{name}.tif").touch()
    for name in [*names[10:20], "Test_001", "test_002"]:
        (tmp_path / "annotations" / "train" / f"{name}.xml").touch()
    run_script("camelyon16", tmp_path, monkeypatch)
    found = read_slide_manifest(tmp_path / "camelyon16.csv", annotations_root=tmp_path / "annotations")
    bags = found.bags.set_index("bag_id")
    assert bags["label"].sum() == 12
    assert bags["split"].value_counts().to_dict() == {"train": 16, "test": 6, "val": 4}
    assert bags.loc["test_001", "label"] == 1
    assert all(slide.annotation.exists() for slide in found.slides if slide.annotation)


def test_tcga_manifest_has_the_split_sizes_of_the_paper(tmp_path, monkeypatch):
    study = tmp_path / "luad_tcga_pan_can_atlas_2018"
    (study / "case_lists").mkdir(parents=True)
    rng = np.random.default_rng(0)
    patients = [f"TCGA-05-{number:04d}" for number in range(480)]
    sequenced = " ".join(f"{patient}-01" for patient in patients[:470])
    (study / "case_lists" / "cases_sequenced.txt").write_text(f"stable_id: x\ncase_list_ids: {sequenced}\n")
    calls = [(gene, "Missense_Mutation", f"{one}-01") for gene in ("TP53", "KRAS", "EGFR", "STK11") for one in patients]
    calls = [call for call in calls if rng.random() < 0.4] + [("TP53", "Silent", f"{one}-01") for one in patients]
    columns = ["Hugo_Symbol", "Variant_Classification", "Tumor_Sample_Barcode"]
    pd.DataFrame(calls, columns=columns).to_csv(study / "data_mutations.txt", sep="\t", index=False)
    owners = [*patients[:470], *rng.choice(patients[:470], 330), *patients[470:]]
    for number, patient in enumerate(owners):
        folder = tmp_path / "slides" / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / f"{patient}-01A-{number:02d}-TS{number}.0A1B.svs").touch()
    run_script("tcga-luad", tmp_path, monkeypatch)
    table = pd.read_csv(tmp_path / "tcga-luad.csv")
    assert table["split"].value_counts().to_dict() == {"train": 477, "test": 227, "val": 96}
    assert table.groupby("group")["split"].nunique().max() == 1
    for gene in ("EGFR", "KRAS", "STK11", "TP53"):
        assert 0.3 < read_slide_manifest(tmp_path / "tcga-luad.csv", label=gene).bags["label"].mean() < 0.5


def test_breast_ultrasound_tables(tmp_path, monkeypatch):
    (tmp_path / "BUSBRA" / "Images").mkdir(parents=True)
    rows = []
    for case in range(12):
        for side in "lr"[: 1 + case % 2]:
            name = f"bus_{case:04d}-{side}"
            Image.new("L", (8, 8)).save(tmp_path / "BUSBRA" / "Images" / f"{name}.png")
            rows.append((name, case, "malignant" if case % 3 == 0 else "benign"))
    pd.DataFrame(rows, columns=["ID", "Case", "Pathology"]).to_csv(tmp_path / "BUSBRA" / "bus_data.csv", index=False)
    run_script("breast-ultrasound", tmp_path, monkeypatch)
    found = read_manifest(tmp_path / "exams.csv", tmp_path / "images.csv", images_root=tmp_path / "BUSBRA" / "Images")
    assert found.bags["label"].sum() == 4
    assert len(found.instances) == 18
    assert all(Path(path).exists() for path in found.instances["file"])
