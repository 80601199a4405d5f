"""Commands that show what a run found, apply it to new bags and hand it on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from its2clr.cli.options import (
    BagOption,
    DefaultMppOption,
    InstanceThresholdOption,
    LimitOption,
    MachineSetOption,
    ModelOption,
    PositiveOption,
    ScoredArgument,
    ScoredSplitOption,
    WorkersOption,
)
from its2clr.cli.output import print_table, progress, say
from its2clr.errors import InputError
from its2clr.launcher import is_first_process
from its2clr.units import MicronsPerPixel

if TYPE_CHECKING:
    from its2clr.maps.source import ScoredModel


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run: finished, still going, stopped or failed.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default: RUN/report.html.")] = None,
) -> None:
    """Write one self-contained HTML page about a run: results, curves, tiles, mistakes, training, settings.

    The page needs no network and can be mailed or printed as it is. If the run was not evaluated, the page shows what
    there is, what is missing and which command comes next; no test label is read for it.

    Example: `its2clr report runs/mine --out mine.html`
    """
    from its2clr.report import write_report

    say(f"report in {write_report(run, out)}")


def map_(
    run: ScoredArgument,
    bags: BagOption = None,
    split: ScoredSplitOption = None,
    limit: LimitOption = 8,
    models: ModelOption = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="Another run on the same cohort, such as an ablation; repeatable.")
    ] = None,
    threshold: InstanceThresholdOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the pictures; default: RUN/maps.")] = None,
    longest: Annotated[int, typer.Option(help="Pixels of the longer side of each panel.")] = 1600,
    full_scale: Annotated[
        bool, typer.Option("--full-scale", help="Also write pyramidal OME-TIFF overlays for QuPath, napari, OpenSlide.")
    ] = False,
    factor: Annotated[
        int | None,
        typer.Option(min=1, help="Slide pixels per overlay pixel. Default: up to 16, such that tiles end on pixels."),
    ] = None,
) -> None:
    """Draw where the models see positives: image, ground truth and one map per model, side by side.

    Writes OUT/maps.png (several bags), OUT/bags (a picture per bag) and, with --full-scale, OUT/overlays.
    RUN may also be what `its2clr predict` wrote.

    Example: `its2clr map runs/mine --bag case-7 --full-scale`

    Ablations beside: `its2clr map runs/mine --beside runs/no-iteration --beside runs/no-pacing`
    """
    from its2clr.maps.sheets import write_maps
    from its2clr.maps.source import models_beside, open_source

    source = open_source(run)
    _say_outdated(source.outdated)
    chosen = source.choose_bags(bags, split, limit)
    shown = models_beside(source, source.choose_models(models), beside or [])
    folder = _folder(out or run / "maps")
    with progress("map", len(chosen), "bags") as bar:
        sheet = write_maps(source, chosen, shown, folder, threshold=threshold, longest=longest, progress=bar.reach)
    say(f"{len(chosen)} bags in {sheet.parent / 'bags'}, at a glance: {sheet}; {_positive_from(shown, threshold)}")
    if full_scale:
        from its2clr.maps.overlay import write_overlays

        with progress("overlay", len(chosen), "bags") as bar:
            place = write_overlays(
                source, chosen, shown, folder, threshold=threshold, factor=factor, progress=bar.reach
            )
        say(f"overlays in {place}")


def geojson(
    run: ScoredArgument,
    bags: BagOption = None,
    split: ScoredSplitOption = None,
    limit: LimitOption = 0,
    models: ModelOption = None,
    threshold: InstanceThresholdOption = None,
    only: Annotated[Literal["regions", "tiles"] | None, typer.Option(help="Write only these.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files; default: RUN/geojson.")] = None,
) -> None:
    """Write tiles with their probabilities and merged positive regions as GeoJSON, one file per bag, for QuPath.

    In QuPath: open the slide and drag the file onto it. RUN may also be what `its2clr predict` wrote. Classes and
    regions are those of the first --model, by default the refined one.

    Example: `its2clr geojson runs/mine --bag case-7`
    """
    from its2clr.maps.geojson_export import write_geojsons
    from its2clr.maps.source import open_source

    source = open_source(run)
    _say_outdated(source.outdated)
    chosen = source.choose_bags(bags, split, limit)
    shown = source.choose_models(models) if models else source.best_first
    folder = _folder(out or run / "geojson")
    with progress("geojson", len(chosen), "bags") as bar:
        write_geojsons(source, chosen, shown, folder, threshold=threshold, only=only, progress=bar.reach)
    say(f"{len(chosen)} files in {folder}; {_positive_from(shown[:1], threshold)}")


def predict(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model file (model.its2clr) or the folder of a run.")
    ],
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Slides, folders of slides, folders of images, a manifest (CSV), or packed cohorts; any number.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the predictions; the same command again does not cut tiles twice.")
    ] = Path("predictions"),
    default_mpp: DefaultMppOption = None,
    workers: WorkersOption = None,
    settings: MachineSetOption = None,
) -> None:
    """Predict new slides, image folders or cohorts with a trained model; labels are not needed and not looked at.

    Slides are tiled, and images packed, like the cohort that the model was trained on. A folder of images is one bag.
    A folder of such folders is one bag per folder. A folder of slides, with all folders below it, is one bag per slide.
    What does not fit the model is left out and listed in OUT/problems.csv.

    OUT/predictions.csv has one row per bag: `probability` (as `its2clr evaluate` gives it), `calibrated_probability`
    (calibrated on validation bags) and `predicted_label` (by the threshold that validation chose).
    OUT/instances.parquet has one row per tile, with its place at level 0.

    RUN/model.its2clr is all that another machine needs besides its2clr itself.

    Example: `its2clr predict runs/mine/model.its2clr scans/ case-7.svs --out predictions/monday`
    """
    from its2clr.predict.new_bags import predict as predict_

    predicted = predict_(
        model,
        inputs,
        out,
        default_mpp=None if default_mpp is None else MicronsPerPixel(default_mpp),
        workers=workers,
        overrides=settings or [],
        quiet=False,
    )
    if is_first_process():
        say("\n".join(predicted.lines()))


def score(
    predictions: Annotated[Path, typer.Argument(metavar="PREDICTIONS", help="Folder of what `its2clr predict` wrote.")],
    bags: Annotated[
        Path,
        typer.Argument(metavar="BAGS", help="Table (CSV) with bag_id and label (0 or 1); other columns are ignored."),
    ],
    instances: Annotated[
        Path | None,
        typer.Option(
            help="Table (CSV) with bag_id, file and label (empty or -1: unknown), as for `its2clr cohort images`."
        ),
    ] = None,
    annotations: Annotated[
        Path | None,
        typer.Option(help="Folder of annotations of the slides (XML, GeoJSON, masks), named as the bags; for tiles."),
    ] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="Annotated class that counts as tumour; may be repeated.")
    ] = None,
    positive: PositiveOption = None,
    split: Annotated[
        str | None, typer.Option(help="Only bags of BAGS with this value in column `split`; default: all.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write; default: PREDICTIONS/scores.json.")
    ] = None,
) -> None:
    """Compare predictions for new bags with their labels: how good is the model on patients it has never seen?

    Prints AUC, AUPRC and, at the model's own threshold, balanced accuracy, F1, sensitivity and specificity, with their
    intervals over bags, and the Brier score of the calibrated probabilities; with --instances or --annotations also how
    well instances are found. Bags that are only in the predictions or only in the labels are named and left out.

    BAGS must hold no bag, and no patient, that the model was trained or validated on; bags that it was are named.

    Example: `its2clr score predictions/monday new/bags.csv`

    With labels of the images, as packed by `its2clr cohort images --instances new/instances.csv`:
    `its2clr score predictions/monday new/bags.csv --instances new/instances.csv`

    With outlines drawn on the slides: `its2clr score predictions/monday new/bags.csv --annotations new/outlines`
    """
    from its2clr.files import write_json
    from its2clr.predict.against_labels import score as score_
    from its2clr.predict.against_labels import score_notes, score_rows
    from its2clr.predict.prediction_folder import SCORES

    found = score_(
        predictions,
        bags,
        instances,
        split,
        annotations=annotations,
        classes=classes or [],
        positive=positive or [],
    )
    written = json_file or predictions / SCORES
    write_json(written, found)
    headings = ("", "bags", "instances") if "instance" in found else ("", "bags")
    print_table(f"{found['bags']['scored']} new bags [95% interval over bags]", headings, score_rows(found))
    for note in score_notes(found):
        say(f"note: {note}")
    say(f"scores in {written}")


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option(help="Folder to make; nothing that exists is overwritten.")],
    encoder: Annotated[
        str | None, typer.Option(help="refined, start or end_to_end. Default: the one that the run hands over.")
    ] = None,
    formats: Annotated[str, typer.Option(help="timm, onnx, features, or several with commas between.")] = "timm",
    licence: Annotated[
        str | None, typer.Option("--license", help="Licence of the weights, for the model card; yours to state.")
    ] = None,
) -> None:
    """Write a run's encoder for other software, with a model card.

    `timm`: weights and config that timm loads without its2clr. `onnx`: one file, uint8 tiles in, features out.
    `features`: those of the run's cohort in TRIDENT's folders, as torchmil reads them.

    Example: `its2clr export runs/mine --out exports/mine --formats timm,onnx,features`
    """
    from its2clr.encoder_export import export_encoder

    names = [name.strip() for name in formats.split(",") if name.strip()]
    folder = export_encoder(run, out, encoder, names, licence, quiet=False)
    say(f"{encoder or 'encoder'} exported ({', '.join(names)}) to {folder}")


def _say_outdated(lines: Sequence[str]) -> None:
    for line in lines:
        say(f"warning: predictions are out of date: {line}")


def _positive_from(models: Sequence["ScoredModel"], threshold: float | None) -> str:
    """The threshold of tiles that was used, and whose it is."""
    from its2clr.maps.source import said_thresholds

    whose = "as given" if threshold is not None else "by the model's own threshold"
    used = said_thresholds({model.title: model.positive_from(threshold) for model in models})
    return f"tiles are positive from a probability of {used} on, {whose}"


def _folder(path: Path) -> Path:
    if path.is_file():
        raise InputError(f"{path}: is a file; give a folder")
    return path
