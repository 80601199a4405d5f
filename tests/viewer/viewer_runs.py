"""Evaluated runs made up in a moment: what the viewer reads, without any training."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from PIL import Image

from its2clr.cohort import Cohort
from its2clr.cohort.features.feature_file import FeatureFile, feature_path, write_feature_file
from its2clr.cohort.images import virtual_grid
from its2clr.cohort.layout import CohortInfo, tile_path, write_bags, write_info
from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest
from its2clr.cohort.tiles import write_tile_file
from its2clr.files import write_json
from its2clr.settings import resolve_config

HOSTILE = [
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "<img src=x onerror=alert(2)>",
    "\"double\" 'single' `back` & ${1+1}",
    "препарат 标本 🔬",
    "%2e%2e%2f?x=1#y",
]
EPOCHS = (0, 2, 4)
MODELS = (("start", "dsmil"), ("refined", "dsmil"), ("refined", "max"))


def png(colour, side=8):
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(buffer, "PNG")
    return buffer.getvalue()


def write_cohort(folder: Path, bag_ids: list[str], instances: int = 9, side: int = 16) -> Path:
    """Bags of plain coloured tiles; every second one is positive, every third val, test or train."""
    write_info(folder, CohortInfo(tile_size=side, encoding="png", has_instance_labels=True))
    for number, bag_id in enumerate(bag_ids):
        colours = [(40 + 20 * (number % 8), 20 * instance, 200) for instance in range(instances)]
        labels = [int(number % 2 == 1 and instance < 2) for instance in range(instances)]
        names = [f"{bag_id} tile {instance}" for instance in range(instances)]
        write_tile_file(
            tile_path(folder, bag_id), [png(colour, side) for colour in colours], virtual_grid(instances, side), names,
            labels, bag_id=bag_id, tile_size=side, tile_size_level0=side, mpp=0.5, source="drawn", encoding="png",
        )  # fmt: skip
    write_bags(folder, _table(bag_ids, instances))
    return folder


def write_overlapping(folder: Path) -> Path:
    """Six slides with one round annotation each, tiled with half of every tile shared."""
    import tifffile

    folder.mkdir(parents=True)
    y, x = np.mgrid[:192, :192]
    image = np.stack([150 + 60 * np.sin(x / 9), 90 + 50 * np.cos(y / 7), 160 + x // 4], axis=-1).astype(np.uint8)
    rows = ["bag_id,file,label,split,annotation"]
    for number in range(6):
        tifffile.imwrite(
            folder / f"{number}.tiff", image, photometric="rgb", tile=(64, 64), resolution=(20000, 20000),
            resolutionunit="CENTIMETER",
        )  # fmt: skip
        angles = np.linspace(0, 2 * np.pi, 40)
        ring = np.stack([96 + 40 * np.cos(angles), 96 + 40 * np.sin(angles)], axis=1).tolist()
        geometry = {"type": "Polygon", "coordinates": [[*ring[:-1], ring[0]]]}
        properties = {"classification": {"name": "Tumor"}}
        feature = {"type": "Feature", "geometry": geometry, "properties": properties}
        (folder / f"{number}.geojson").write_text(json.dumps(feature))
        annotation = f"{number}.geojson" if number % 2 else ""
        rows.append(f"s{number},{number}.tiff,{number % 2},{('train', 'val', 'test')[number // 2]},{annotation}")
    (folder / "slides.csv").write_text("\n".join(rows))
    settings = SlideSettings(mpp=0.5, tile_size=64, overlap=32, min_saturation=0)
    pack_slides(read_slide_manifest(folder / "slides.csv"), folder / "packed", settings, workers=1)
    return folder / "packed"


def write_large_cohort(folder: Path, count: int) -> Path:
    """Very many bags that share one tile file."""
    bag_ids = [f"bag {number:05d}" for number in range(count)]
    write_cohort(folder, bag_ids[:1], instances=1)
    for bag_id in bag_ids[1:]:
        os.link(tile_path(folder, bag_ids[0]), tile_path(folder, bag_id))
    write_bags(folder, _table(bag_ids, 1))
    return folder


def _table(bag_ids: list[str], instances: int) -> pd.DataFrame:
    count = len(bag_ids)
    return pd.DataFrame(
        {
            "bag_id": bag_ids,
            "label": [number % 2 for number in range(count)],
            "split": [("train", "val", "test")[number // 2 % 3] for number in range(count)],
            "group": [f"group of {bag_id}" for bag_id in bag_ids],
            "n_instances": instances,
        }
    )


def write_run(folder: Path, cohort_folder: Path, *, features: bool = True) -> Path:
    """The files of an evaluated run with random scores, rounds and features."""
    folder.mkdir(parents=True)
    config = resolve_config("demo").model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump({"cohort": str(cohort_folder), **config}), encoding="utf-8")
    cohort = Cohort.open(cohort_folder)
    random = np.random.default_rng(0)
    bag = cohort.bag_index()
    place = {"bag_id": cohort.bags["bag_id"].to_numpy()[bag], "instance": np.arange(len(bag)) - cohort.offsets()[bag]}
    tables, bag_tables = [], []
    for encoder, aggregator in MODELS:
        of_bags = random.random(len(cohort))
        found = {"probability": random.random(len(bag)), "bag_probability": of_bags[bag]}
        tables.append(pd.DataFrame({**place, "encoder": encoder, "aggregator": aggregator, **found}))
        bags = cohort.bags[["bag_id", "label", "split", "group"]]
        bag_tables.append(bags.assign(encoder=encoder, aggregator=aggregator, probability=of_bags))
    pd.concat(tables).to_parquet(folder / "predictions.parquet", index=False)
    pd.concat(bag_tables).to_csv(folder / "bag_predictions.csv", index=False)
    measured = {"thresholds": {"bag": 0.4, "instance": 0.35}}
    results = {"aggregator": "dsmil", "method": "ItS2CLR", "start": {"test": measured}}
    results["refined"] = {"test": measured, "aggregators": {"max": {"thresholds": {"bag": 0.7, "instance": 0.5}}}}
    results["rounds"] = [{"epoch": epoch, "validation_auc": 0.9, "threshold": 0.5} for epoch in EPOCHS]
    write_json(folder / "results.json", results)
    in_train = np.isin(bag, np.flatnonzero(cohort.bags["split"] == "train"))
    for epoch in EPOCHS:
        table = pd.DataFrame(place)[in_train].reset_index(drop=True)
        table["probability"] = random.random(len(table)).astype(np.float32)
        table["pseudo_label"] = (table["probability"] > 0.5).astype(np.int8)
        table["selected"] = random.integers(-1, 2, len(table)).astype(np.int8)
        target = folder / "rounds" / f"{epoch:03d}"
        target.mkdir(parents=True)
        table.to_parquet(target / "pseudo_labels.parquet", index=False)
    if features:
        _write_features(folder, cohort, random)
    return folder


def _write_features(run: Path, cohort: Cohort, random: np.random.Generator) -> None:
    for encoder in ("start", "refined"):
        for bag_id, count in zip(cohort.bags["bag_id"], cohort.bags["n_instances"], strict=True):
            features = random.normal(size=(count, 6)).astype(np.float32)
            file = FeatureFile(features, cohort.tile_file(bag_id).coords, "made up")
            path = feature_path(run / "features" / encoder, bag_id)
            write_feature_file(path, file, bag_id=bag_id, tile_size=16, tile_size_level0=16, mpp=0.5)
