"""The command line: parse, call, print."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from its2clr import __version__
from its2clr.errors import InputError, Its2clrError

app = typer.Typer(
    name="its2clr",
    help="Learn, from bag labels alone, tile representations, a bag classifier and a map of the positives (ItS2CLR).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
cohort_app = typer.Typer(help="Make a cohort: one folder of packed tiles and bag labels.", no_args_is_help=True)
app.add_typer(cohort_app, name="cohort")
console = Console(highlight=False)
INTERRUPTED = 130
"""Exit code of a command stopped by Ctrl-C."""

CohortArgument = Annotated[Path, typer.Argument(help="Folder of a cohort, as `its2clr cohort` makes it.")]
OptionalCohort = Annotated[
    Path | None, typer.Argument(help="Folder of a cohort; may be left out for a run that has begun.")
]
RunOption = Annotated[
    Path, typer.Option("--out", help="Folder of the run; the same command again goes on where it stopped.")
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        help="Recipe by name (`its2clr recipes` lists them) or YAML file; default: the run's settings, or the paper's "
        "(on a cohort of features: `features`)."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting, e.g. `--set refine.epochs=20`; may be repeated."),
]
SeedOption = Annotated[int, typer.Option(help="Seed of every random choice.")]
SizeName = Literal["tiny", "small", "medium", "large"]
SizeOption = Annotated[SizeName, typer.Option(help="Size of the cohort: small suits a CPU, medium and large a GPU.")]
BudgetName = Literal["smoke", "quick", "paper"]
EncodingName = Literal["jpeg", "png"]
ResizeName = Literal["bilinear", "nearest", "bicubic"]
StainName = Literal["macenko", "vahadane"]
UnlabelledOption = Annotated[
    bool, typer.Option("--unlabelled", help="The manifest has no labels: new bags, to be predicted only.")
]
ScoredArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of an evaluated run, or of what `its2clr predict` wrote.")
]
BagOption = Annotated[list[str] | None, typer.Option("--bag", help="A bag by its id; may be repeated.")]
ScoredSplitOption = Annotated[
    str | None, typer.Option("--split", help="train, val or test; default: test, of predictions all.")
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="simclr, its2clr or end_to_end, or with another aggregator its2clr+max; may be repeated."
    ),
]
WorkersOption = Annotated[int | None, typer.Option(help="Parallel workers; default: all cores.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def demo(
    run: RunOption = Path("runs/demo"),
    size: SizeOption = "small",
    recipe: RecipeOption = "demo",
    settings: SetOption = None,
    seed: SeedOption = 0,
) -> None:
    """Draw the embedded cohort, run every stage on it, print SimCLR against ItS2CLR and draw maps of positive bags.

    Takes a few minutes on two CPU cores. Open RUN/report.html to see how it went; maps are in RUN/maps, numbers in
    RUN/results.json.
    """
    cohort = run / "cohort"
    _draw_synthetic(cohort, size, seed, None)
    _fit(cohort, run, recipe, [f"seed={seed}", *(settings or [])])
    if os.environ.get("RANK", "0") == "0":
        from its2clr.results.maps import SHEET_BAGS, write_maps
        from its2clr.results.source import open_source

        source = open_source(run)
        bags = source.choose_bags(None, "test", SHEET_BAGS)
        sheet = write_maps(source, bags, source.usual, run / "maps", threshold=0.2)
        console.print(f"maps of {len(bags)} test bags, positive ones first: {sheet}", markup=False, soft_wrap=True)


@app.command()
def fit(
    cohort: OptionalCohort = None,
    run: RunOption = Path("runs/fit"),
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Run every stage: pretrain, aggregate, refine, aggregate, evaluate; and write RUN/report.html.

    Example: `its2clr fit cohorts/mine --out runs/mine --recipe malaria-smears`
    """
    _fit(cohort, run, recipe, settings)


@app.command()
def pretrain(
    cohort: OptionalCohort = None,
    run: RunOption = Path("runs/fit"),
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Self-supervised start on the training tiles; leaves RUN/checkpoints/encoder-simclr.safetensors.

    SimCLR, or with `--set pretrain.method=moco` (byol, dino, bag_labels) another start.
    """
    _stages(cohort, run, recipe, settings).pretrain()


@app.command()
def extract(
    cohort: OptionalCohort = None,
    run: RunOption = Path("runs/fit"),
    encoder: Annotated[str, typer.Option(help="simclr, its2clr or end_to_end.")] = "its2clr",
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Write the features of every bag (TRIDENT layout) to RUN/features/ENCODER."""
    from its2clr.cohort import Cohort

    stages = _stages(cohort, run, recipe, settings)
    unlabelled = Cohort.open(stages.run.cohort).without_labels()
    for split in sorted(set(unlabelled.bags["split"])):
        stages.features(encoder, unlabelled.split(split))
    stages.engine.say(f"extract: {len(unlabelled)} bags in {stages.run.path / 'features' / encoder}")


@app.command()
def aggregate(
    cohort: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a cohort, or with --labels of feature files; may be left out for a run that has begun."
        ),
    ] = None,
    run: RunOption = Path("runs/fit"),
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Whose features: simclr, its2clr or end_to_end; default: its2clr, of a new run on features "
            "the features themselves."
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="Table with bag_id and label: COHORT is a folder of feature files (TRIDENT, CLAM, STAMP)."),
    ] = None,
    coords: Annotated[
        Path | None, typer.Option(help="With --labels: folder of CLAM's `patches`, if not beside the features.")
    ] = None,
    aggregators: Annotated[
        list[str] | None,
        typer.Option("--aggregator", help="Another aggregator than the run's; may be repeated to compare several."),
    ] = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Train the aggregator on an encoder's frozen features, once per retraining seed.

    Several over the same features: `its2clr aggregate --out runs/mine --aggregator max --aggregator transformer`,
    then `its2clr evaluate runs/mine`.

    On features made elsewhere: `its2clr aggregate features_uni_v1/ --labels labels.csv --out runs/uni`.
    """
    if labels is not None:
        from its2clr.run_features import cohort_of_features

        if cohort is None:
            raise InputError("--labels: name the folder of feature files, `its2clr aggregate FEATURES --labels TABLE`")
        cohort = cohort_of_features(cohort, labels, run, coords, _say)
    stages = _stages(cohort, run, recipe, settings)
    chosen = encoder or stages.usual_encoder()
    for name in aggregators or [stages.config.aggregator.name]:
        stages.aggregate(chosen, name)


@app.command()
def refine(
    cohort: OptionalCohort = None,
    run: RunOption = Path("runs/fit"),
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Algorithm 1: refine the pretrained encoder with pseudo labels (pretrains first if needed)."""
    _stages(cohort, run, recipe, settings).refine()


@app.command()
def correct(
    run: Annotated[Path, typer.Argument(help="Folder of the run that was looked at.")],
    corrections: Annotated[Path, typer.Argument(help="Folder with a GeoJSON file per corrected bag.")],
    out: Annotated[Path, typer.Option(help="Folder of the new run.")],
    encoder: Annotated[str, typer.Option(help="Encoder to start from: its2clr or simclr.")] = "its2clr",
) -> None:
    """Refine again with a person's corrections: tiles marked as truly positive or negative are trusted.

    In QuPath, give areas or tiles the class `Confirmed positive` or `Confirmed negative` and export each slide as
    GeoJSON, named like its bag. Only training bags count; the new run keeps cohort and settings of the other.

    Example: `its2clr correct runs/mine corrections/ --out runs/corrected`
    """
    from its2clr.pipeline import open_corrected

    _fit_and_evaluate(open_corrected(run, corrections, out, encoder))


@app.command("end-to-end")
def end_to_end(
    cohort: OptionalCohort = None,
    run: RunOption = Path("runs/end-to-end"),
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Train encoder and aggregator together on whole bags, from SimCLR weights or from scratch: a baseline.

    Large bags fit: `--set end_to_end.tiles_per_pass=64` keeps the activations of 64 tiles in memory at a time.
    From scratch: `--set end_to_end.start=scratch`. From the weights of another run: `--set pretrain.start=runs/mine`.
    """
    stages = _stages(cohort, run, recipe, settings)
    stages.end_to_end()
    _evaluate(stages)


@app.command()
def evaluate(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Measure a finished run on its test bags; the only command that reads test labels."""
    _evaluate(_stages(None, run, None, None))


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="Folder of an evaluated run.")],
    host: Annotated[
        str, typer.Option(help="Address to listen at; any but this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    token: Annotated[
        str | None, typer.Option(help="What a browser must show; default: none here, a new one for other hosts.")
    ] = None,
    open_browser: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open a browser; default: where there is a screen.")
    ] = None,
) -> None:
    """Walk through a run in the browser: bags with scores, slides with heat, rounds, instances and their neighbours.

    Nothing leaves this machine, and no network is needed. Press ? in the browser for the keys.

    Example: `its2clr view runs/demo`

    On a server, best through a tunnel: `ssh -t -L 8000:localhost:8000 server its2clr view runs/mine`. To be reached by
    others: `its2clr view runs/mine --host 0.0.0.0`; the address it prints holds a token, without which nobody gets in.
    """
    from its2clr.results.viewer.serve import serve

    serve(
        run,
        host=host,
        port=port,
        token=token,
        open_browser=open_browser,
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Labels as in the paper's source, or `all`.")
    ] = None,
    cohort: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of a cohort; `DATASET=FOLDER` for one dataset of the paper (camelyon16, breast-ultrasound, "
            "tcga-egfr, ...); may be repeated. Without any, the embedded cohort of the budget is drawn."
        ),
    ] = None,
    budget: Annotated[BudgetName, typer.Option(help="How much to train: smoke tries the structure in minutes.")] = (
        "quick"
    ),
    seeds: Annotated[int | None, typer.Option(min=1, help="Training seeds; default: the budget's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and tables; what is there is not done again.")] = Path(
        "runs/reproduce"
    ),
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; default: one per GPU, two on a CPU.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe to use instead of the budget's settings.")] = None,
    settings: SetOption = None,
    no_train: Annotated[
        bool, typer.Option("--no-train", help="Train nothing: make the tables from the runs that are finished.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the tables and figures, and stop.")] = False,
) -> None:
    """Make tables and figures of the paper on your cohort, with the paper's numbers beside.

    Runs that several of them share are trained once, and kept for the next call. Each table or figure becomes a
    folder with README.md, table.csv, result.json and plot.png; `results.md` is the page of all that were asked for.
    Exits 1 when a run failed.

    Example: `its2clr reproduce tab:aggregator_results fig:training_process --cohort cohorts/mine --seeds 3`
    """
    from its2clr.config import parse_override
    from its2clr.experiments.reproduce import default_workers, embedded_cohort, parse_cohorts
    from its2clr.experiments.reproduce import reproduce as reproduce_
    from its2clr.experiments.spec import experiments, select

    if list_ or not names:
        for spec in experiments().values():
            console.print(f"{spec.label:<24} {spec.title}", markup=False, soft_wrap=True)
        return
    select(names)
    page, failed = reproduce_(
        names,
        parse_cohorts(cohort) if cohort else {"": embedded_cohort(budget, out)},
        out,
        budget=budget,
        seeds=seeds,
        workers=workers or default_workers(),
        recipe=recipe,
        overrides=dict(parse_override(text) for text in settings or []),
        train=not no_train,
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
    console.print(f"page: {page}", markup=False, soft_wrap=True)
    if failed:
        console.print(f"{failed} run(s) failed; {out / 'problems.csv'} says why", markup=False, soft_wrap=True)
        raise typer.Exit(1)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run: finished, still going, stopped or failed.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default: RUN/report.html.")] = None,
) -> None:
    """Write one self-contained HTML page about a run: results, curves, tiles, mistakes, training, settings.

    The page needs no network and can be mailed or printed as it is. Of a run that was not evaluated it shows what
    there is, says what is missing and which command goes on; no test label is read for it.

    Example: `its2clr report runs/mine --out mine.html`
    """
    from its2clr.results.report import write_report

    console.print(f"report in {write_report(run, out)}", markup=False, soft_wrap=True)


@app.command()
def bench(
    size: Annotated[
        Literal["small", "full"] | None, typer.Option(help="Default: full on a GPU, small on a CPU.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the numbers; a plot of the growth goes beside it.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="rates, aggregators, scaling or agreement, repeatable; joins what --out holds already."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="e.g. engine.compile=never or encoder.name=resnet50.")
    ] = None,
) -> None:
    """Measure how close the stages come to what this machine can do, as ratios within one run (minutes)."""
    import torch

    from its2clr.bench.report import GROUPS, joined, plot_scaling, run_benchmarks
    from its2clr.config import resolve_config
    from its2clr.engine.files import read_json, write_json

    chosen = size or ("full" if torch.cuda.is_available() else "small")
    config = resolve_config(None, settings or [])
    groups = only or list(GROUPS)
    if unknown := set(groups) - set(GROUPS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not one of {', '.join(GROUPS)}", param_hint="--only")
    found = run_benchmarks(chosen, config, lambda text: console.print(text, highlight=False, soft_wrap=True), groups)
    if out is not None:
        found = joined(read_json(out), found) if only and out.exists() else found
        write_json(out, found)
        if "scaling_seconds" in found:
            plot_scaling(found, out.with_suffix(".png"))
    table = Table(title=f"{found['hardware']['device']}, {found['hardware']['precision']}, size {chosen}")
    table.add_column("", no_wrap=True)
    table.add_column("ratio", justify="right")
    for name, value in found["ratios"].items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)
    if update := found.get("update_seconds"):
        console.print(
            f"one pseudo-label update on {update['tiles']:.0f} tiles: {update['update']:.1f} s", highlight=False
        )
    if projected := found.get("simclr_600_epochs_of_250000_tiles"):
        hours = projected["hours, projected"]
        console.print(f"the paper's SimCLR (600 epochs of 250,000 tiles) at this rate: {hours:.1f} h", highlight=False)


@app.command("map")
def map_(
    run: ScoredArgument,
    bags: BagOption = None,
    split: ScoredSplitOption = None,
    limit: Annotated[
        int, typer.Option(min=0, help="How many bags at most, positive (of predictions: likely) ones first; 0: all.")
    ] = 8,
    models: ModelOption = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="Another run on the same cohort, such as an ablation; repeatable.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Probability below which the map is transparent; 0.2 in the paper.")
    ] = 0.2,
    out: Annotated[Path | None, typer.Option(help="Folder for the pictures; default: RUN/maps.")] = None,
    longest: Annotated[int, typer.Option(help="Pixels of the longer side of each panel.")] = 1600,
    full_scale: Annotated[
        bool, typer.Option("--full-scale", help="Also write pyramidal OME-TIFF overlays for QuPath, napari, OpenSlide.")
    ] = False,
    factor: Annotated[
        int | None,
        typer.Option(min=1, help="Slide pixels per overlay pixel; default: up to 16, so that tiles end on pixels."),
    ] = None,
) -> None:
    """Draw where the models see positives: image, ground truth and one map per model, side by side.

    Leaves OUT/maps.png (several bags), OUT/bags (a picture per bag) and, with --full-scale, OUT/overlays.
    RUN may also be what `its2clr predict` wrote.

    Example: `its2clr map runs/mine --bag case-7 --full-scale`

    Ablations beside: `its2clr map runs/mine --beside runs/no-iteration --beside runs/no-pacing`
    """
    from its2clr.engine.progress import ProgressBar
    from its2clr.results.maps import models_beside, write_maps, write_overlays
    from its2clr.results.source import open_source

    source = open_source(run)
    chosen = source.choose_bags(bags, split, limit)
    shown = models_beside(source, source.choose_models(models), beside or [])
    folder = _folder(out or run / "maps")
    with ProgressBar(console=console).start("map", len(chosen), "bags") as progress:
        sheet = write_maps(source, chosen, shown, folder, threshold=threshold, longest=longest, progress=progress.reach)
    console.print(f"{len(chosen)} bags in {sheet.parent / 'bags'}, at a glance: {sheet}", markup=False, soft_wrap=True)
    if full_scale:
        with ProgressBar(console=console).start("overlay", len(chosen), "bags") as progress:
            place = write_overlays(
                source, chosen, shown, folder, threshold=threshold, factor=factor, progress=progress.reach
            )
        console.print(f"overlays in {place}", markup=False, soft_wrap=True)


@app.command()
def geojson(
    run: ScoredArgument,
    bags: BagOption = None,
    split: ScoredSplitOption = None,
    limit: Annotated[
        int, typer.Option(min=0, help="How many bags at most, positive (of predictions: likely) ones first; 0: all.")
    ] = 0,
    models: ModelOption = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Least probability of what is positive.")] = 0.5,
    only: Annotated[Literal["regions", "tiles"] | None, typer.Option(help="Leave the other part out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files; default: RUN/geojson.")] = None,
) -> None:
    """Write tiles with their probabilities and merged positive regions as GeoJSON, one file per bag, for QuPath.

    In QuPath: open the slide, drag the file onto it. RUN may also be what `its2clr predict` wrote. Classes and regions
    are those of the first --model, by default of the refined one.

    Example: `its2clr geojson runs/mine --bag case-7 --threshold 0.5`
    """
    from its2clr.engine.progress import ProgressBar
    from its2clr.results.geojson import write_geojsons
    from its2clr.results.source import open_source

    source = open_source(run)
    chosen = source.choose_bags(bags, split, limit)
    shown = source.choose_models(models) if models else source.best_first
    folder = _folder(out or run / "geojson")
    with ProgressBar(console=console).start("geojson", len(chosen), "bags") as progress:
        write_geojsons(source, chosen, shown, folder, threshold=threshold, only=only, progress=progress.reach)
    console.print(f"{len(chosen)} files in {folder}", markup=False, soft_wrap=True)


@app.command()
def doctor(
    path: Annotated[Path, typer.Argument(help="Folder of a cohort, or a manifest CSV.")],
    instances: Annotated[Path | None, typer.Option(help="Instances CSV of the manifest.")] = None,
    images_root: Annotated[Path | None, typer.Option(help="Folder of the instances' files.")] = None,
    unlabelled: UnlabelledOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Do not decode every image.")] = False,
) -> None:
    """Check a cohort or a manifest and say what is wrong; exits 1 when there is an error."""
    from its2clr.cohort import examine

    findings = examine(path, decode=not quick, instances=instances, images_root=images_root, labelled=not unlabelled)
    colours = {"error": "bold red", "warning": "yellow", "note": "dim"}
    for finding in findings:
        console.print(f"[{colours[finding.level]}]{finding.level:<8}[/] ", end="")
        console.print(f"{finding.where}: {finding.message}", markup=False, soft_wrap=True)
    counts = {level: sum(finding.level == level for finding in findings) for level in colours}
    console.print(f"{counts['error']} errors, {counts['warning']} warnings, {counts['note']} notes")
    if counts["error"]:
        raise typer.Exit(1)


@app.command()
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
    default_mpp: Annotated[
        float | None, typer.Option(help="Microns per pixel of slides where neither file nor manifest says.")
    ] = None,
    workers: WorkersOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the machine, e.g. `--set engine.accelerator=cpu`, or `plugins`."),
    ] = None,
) -> None:
    """Predict new slides, image folders or cohorts with a trained model; labels are not needed and not looked at.

    Slides are tiled, and images packed, as the model's own training cohort was. A folder of images is one bag, a folder
    of such folders is one bag each, and a folder of slides, searched with all folders below, is one bag for each slide.
    What does not fit the model is a row in OUT/problems.csv, the rest goes on.

    OUT/predictions.csv has one row per bag: `probability` (as `its2clr evaluate` gives it), `calibrated_probability`
    (calibrated on validation bags) and `predicted_label` (by the threshold that validation chose).
    OUT/instances.parquet has one row per tile, with its place at level 0.

    RUN/model.its2clr is all that another machine needs besides its2clr itself.

    Example: `its2clr predict runs/mine/model.its2clr scans/ case-7.svs --out predictions/monday`
    """
    from its2clr.results.predict import predict as predict_

    predicted = predict_(
        model, inputs, out, default_mpp=default_mpp, workers=workers, overrides=settings or [], quiet=False
    )
    if os.environ.get("RANK", "0") == "0":
        for line in predicted.lines():
            console.print(line, markup=False, soft_wrap=True)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option(help="Folder to make; nothing that exists is overwritten.")],
    encoder: Annotated[str, typer.Option(help="its2clr, simclr or end_to_end.")] = "its2clr",
    formats: Annotated[str, typer.Option(help="Of timm, onnx and features, with commas between.")] = "timm",
    licence: Annotated[
        str | None, typer.Option("--license", help="Licence of the weights, for the model card; yours to state.")
    ] = None,
) -> None:
    """Write a run's encoder for other software, with a model card.

    `timm`: weights and config that timm loads without its2clr. `onnx`: one file, uint8 tiles in, features out.
    `features`: those of the run's cohort in TRIDENT's folders, as torchmil reads them.

    Example: `its2clr export runs/mine --out exports/mine --formats timm,onnx,features`
    """
    from its2clr.results.encoder_export import export_encoder

    names = [name.strip() for name in formats.split(",") if name.strip()]
    folder = export_encoder(run, out, encoder, names, licence, quiet=False)
    console.print(f"{encoder} exported ({', '.join(names)}) to {folder}", markup=False, soft_wrap=True)


@app.command()
def weights(
    source: Annotated[
        str,
        typer.Argument(metavar="FILE", help="File, folder in timm's hub layout, or hub name (`hf-hub:OWNER/NAME`)."),
    ],
    encoder: Annotated[str | None, typer.Option(help="timm name; default: encoder.name of the settings.")] = None,
    norm: Annotated[Literal["batch", "instance"] | None, typer.Option(help="Its normalisation layers.")] = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Show which tensors of a file an encoder would take as `encoder.weights`, and which not; nothing is changed.

    Exits 2 when they are not weights of this encoder.

    Example: `its2clr weights checkpoints/model.pth --encoder resnet18 --norm instance`
    """
    from its2clr.encoders.foreign import report_weights

    chosen = [f"encoder.{key}={value}" for key, value in (("name", encoder), ("norm", norm)) if value is not None]
    for line in report_weights(source, recipe, [*chosen, *(settings or [])]).lines():
        console.print(line, markup=False, soft_wrap=True)


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Show this recipe, resolved.")] = None) -> None:
    """List the recipes, or show every setting of one."""
    import yaml

    from its2clr.config import read_recipe, recipe_names, resolve_config

    if name is None:
        console.print("\n".join(recipe_names()))
        return
    read_recipe(name)
    console.print(yaml.safe_dump(resolve_config(name).model_dump(mode="json"), sort_keys=False), markup=False)


@cohort_app.command("images")
def cohort_images(
    manifest: Annotated[Path, typer.Argument(help="CSV with bag_id, label and path (a folder of images).")],
    out: Annotated[Path, typer.Argument(help="Folder of the new cohort.")],
    instances: Annotated[
        Path | None, typer.Option(help="CSV with bag_id, file and optionally label, instead of paths.")
    ] = None,
    images_root: Annotated[Path | None, typer.Option(help="Folder of the instances' files.")] = None,
    unlabelled: UnlabelledOption = False,
    tile_size: Annotated[int, typer.Option(help="Side of the stored tiles in pixels.")] = 224,
    encoding: Annotated[EncodingName, typer.Option(help="How changed images are stored.")] = "jpeg",
    quality: Annotated[int, typer.Option(help="JPEG quality.")] = 95,
    resize: Annotated[ResizeName, typer.Option(help="How pixels are interpolated.")] = "bilinear",
    fractions: Annotated[
        tuple[float, float, float],
        typer.Option(help="Shares of train, val and test where no split is given."),
    ] = (0.6, 0.15, 0.25),
    seed: SeedOption = 0,
    workers: WorkersOption = None,
) -> None:
    """Pack bags of ordinary images; every image is checked, bad ones go to problems.csv."""
    from its2clr.cohort import pack_images, read_manifest
    from its2clr.engine.progress import ProgressBar

    bags = read_manifest(manifest, instances, images_root, labelled=not unlabelled)
    with ProgressBar(console=console).start("pack", len(bags.bags), "bags") as progress:
        summary = pack_images(
            bags,
            out,
            tile_size=tile_size,
            encoding=encoding,
            quality=quality,
            resize=resize,
            workers=workers,
            seed=seed,
            fractions=fractions,
            progress=progress.reach,
        )
    console.print(
        f"{summary.path}: {summary.n_bags} bags, {summary.n_instances} images; {summary.n_packed} bags packed now, "
        f"{summary.n_skipped} were there; left out: {summary.n_images_left_out} images, "
        f"{len(summary.bags_left_out)} bags" + (" (problems.csv says why)" if summary.n_images_left_out else ""),
        soft_wrap=True,
    )


@cohort_app.command("slides")
def cohort_slides(
    manifest: Annotated[Path, typer.Argument(help="CSV with one row per slide; see above.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new cohort.")],
    magnification: Annotated[
        float | None, typer.Option(help="Scale of the tiles, e.g. 5, 10 or 20: 10 / x microns per pixel.")
    ] = None,
    mpp: Annotated[float | None, typer.Option(help="Scale of the tiles in microns per pixel, instead.")] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of the labels, of several (EGFR, KRAS, ...); empty cells are left out.")
    ] = None,
    unlabelled: UnlabelledOption = False,
    tile_size: Annotated[int, typer.Option(help="Side of the stored tiles in pixels.")] = 224,
    overlap: Annotated[int, typer.Option(help="Pixels that neighbouring tiles share.")] = 0,
    resize: Annotated[ResizeName, typer.Option(help="How pixels are interpolated.")] = "bilinear",
    min_saturation: Annotated[float, typer.Option(help="Keep tiles of this mean HSV saturation, of 255.")] = 30.0,
    min_tissue: Annotated[float, typer.Option(help="Share of a tile's pixels that must be that saturated.")] = 0.0,
    skip_glass: Annotated[
        bool,
        typer.Option(
            "--skip-glass/--read-all",
            help="Pass over what a coarse level shows as bare glass, tested on each slide; or read every tile.",
        ),
    ] = True,
    default_mpp: Annotated[
        float | None, typer.Option(help="Microns per pixel of slides where neither file nor manifest says.")
    ] = None,
    slides_root: Annotated[Path | None, typer.Option(help="Folder of the files; default: the manifest's.")] = None,
    annotations_root: Annotated[
        Path | None, typer.Option(help="Folder of the annotations; default: the manifest's.")
    ] = None,
    min_covered: Annotated[
        float,
        typer.Option(
            help="Annotated share that makes a tile positive; less, but some, is unknown. 0: any tumour does."
        ),
    ] = 0.0,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="Annotated class that counts as tumour; may be repeated.")
    ] = None,
    stain: Annotated[StainName | None, typer.Option(help="Normalise the stains of every slide.")] = None,
    encoding: Annotated[EncodingName, typer.Option(help="How tiles are stored.")] = "jpeg",
    quality: Annotated[int, typer.Option(help="JPEG quality.")] = 95,
    fractions: Annotated[
        tuple[float, float, float],
        typer.Option(help="Shares of train, val and test where no split is given."),
    ] = (0.6, 0.15, 0.25),
    seed: SeedOption = 0,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler, e.g. tcp://node:8786; default: this machine.")
    ] = None,
    workers: WorkersOption = None,
) -> None:
    """Tile whole slides: everything OpenSlide reads (of a DICOM slide name one file), TIFF and OME-TIFF.

    The manifest is a table like this; `patient`, `split`, `mpp` and `annotation` may be missing:

        bag_id,file,label,patient,split,mpp,annotation

        case-1,scans/case-1.svs,1,p01,train,,case-1.xml

        case-2,scans/case-2.tiff,0,p02,train,0.25,

    The scale of a slide is what its file says if that can be, else column `mpp`, else `--default-mpp`; a slide
    without any is left out. A slide that cannot be used is a row in OUT/problems.csv, the rest goes on. Look at
    OUT/overviews to see what was kept. The same command again goes on where it stopped.

    Tissue that the coarse levels of a file do not hold at all can be missed; `--read-all` is slower and misses nothing.

    Example: `its2clr cohort slides slides.csv cohorts/mine --magnification 5 --resize nearest`
    """
    from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest, target_mpp
    from its2clr.engine.progress import ProgressBar

    settings = SlideSettings(
        mpp=target_mpp(magnification, mpp),
        tile_size=tile_size,
        overlap=overlap,
        resize=resize,
        min_saturation=min_saturation,
        min_tissue=min_tissue,
        min_covered=min_covered,
        classes=tuple(classes or ()),
        stain=stain,
        default_mpp=default_mpp,
        encoding=encoding,
        quality=quality,
        skip_glass=skip_glass,
    )
    slides = read_slide_manifest(
        manifest, label=label, slides_root=slides_root, annotations_root=annotations_root, labelled=not unlabelled
    )
    with ProgressBar(console=console).start("tile", len(slides.slides), "slides") as progress:
        summary = pack_slides(
            slides,
            out,
            settings,
            scheduler=scheduler,
            workers=workers,
            seed=seed,
            fractions=fractions,
            progress=progress.reach_with("tiles"),
        )
    for line in summary.lines():
        console.print(line, markup=False, soft_wrap=True)


@cohort_app.command("features")
def cohort_features(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="[MANIFEST] OUT", help="Table with bag_id and label, and the folder of the new cohort."),
    ],
    features: Annotated[
        Path | None, typer.Option(help="Folder of feature files of TRIDENT, CLAM, STAMP or its2clr.")
    ] = None,
    coords: Annotated[
        Path | None, typer.Option(help="Folder of CLAM's `patches`, if it is not beside the features.")
    ] = None,
    slides_root: Annotated[
        Path | None, typer.Option(help="Folder of the slides of column `file`; default: the manifest's.")
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option(help="A run whose own features to take, instead of manifest and files.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="With --from-run: simclr, its2clr or end_to_end.")] = "simclr",
    unlabelled: UnlabelledOption = False,
    fractions: Annotated[
        tuple[float, float, float],
        typer.Option(help="Shares of train, val and test where no split is given."),
    ] = (0.6, 0.15, 0.25),
    seed: SeedOption = 0,
    workers: WorkersOption = None,
) -> None:
    """Make a cohort of features that were made elsewhere; `fit` then refines an adapter over them.

    The manifest is a table like this; all but `bag_id` and `label` may be missing:

        bag_id,label,group,split,features,file,mpp

        case-1,1,p01,train,,scans/case-1.svs,

        case-2,0,p02,train,case-2_b.h5,,0.25

    The feature file of a bag is called like it (`case-1.h5` or `case-1.pt`), unless column `features` names it. Column
    `file` names the slide, which maps are then drawn on, and `mpp` the microns per pixel of its level 0, which STAMP's
    coordinates need. A file that cannot be used is a row in OUT/problems.csv, the rest goes on.

    Example: `its2clr cohort features labels.csv cohorts/uni --features trident/20x_256px_0px_overlap/features_uni_v1`

    Of a run's own encoder: `its2clr cohort features cohorts/simclr --from-run runs/mine --encoder simclr`
    """
    from its2clr.cohort.feature_cohort import pack_features, read_feature_manifest
    from its2clr.engine.progress import ProgressBar
    from its2clr.run_features import pack_run_features

    if len(paths) != (2 if from_run is None else 1) or (features is None) == (from_run is None):
        raise InputError(
            "give `its2clr cohort features MANIFEST OUT --features DIR`, or `... cohort features OUT --from-run RUN`"
        )
    if from_run is not None:
        summary = pack_run_features(_stages(None, from_run, None, None), encoder, paths[0])
    else:
        assert features is not None
        bags = read_feature_manifest(paths[0], features, labelled=not unlabelled, slides_root=slides_root)
        with ProgressBar(console=console).start("pack", len(bags.bags), "bags") as progress:
            summary = pack_features(
                bags,
                paths[1],
                coords=coords,
                seed=seed,
                fractions=fractions,
                workers=workers,
                progress=progress.reach,
            )
    for line in summary.lines():
        _say(line)


@cohort_app.command("synthetic")
def cohort_synthetic(
    out: Annotated[Path, typer.Argument(help="Folder of the new cohort.")],
    size: SizeOption = "small",
    seed: SeedOption = 0,
    settings: SetOption = None,
    workers: WorkersOption = None,
) -> None:
    """Draw procedural slides with instance ground truth: the embedded cohort."""
    _draw_synthetic(out, size, seed, workers, settings)


@cohort_app.command("resample")
def cohort_resample(
    cohort: CohortArgument,
    out: Annotated[Path, typer.Argument(help="Folder of the new cohort.")],
    keep_negatives: Annotated[float, typer.Option(help="Share of negatives kept: less raises the witness rate.")] = 1.0,
    keep_positives: Annotated[float, typer.Option(help="Share of positives kept: less lowers the witness rate.")] = 1.0,
    all_bags: Annotated[bool, typer.Option("--all-bags", help="Drop negatives from negative bags too.")] = False,
    sub_bag_size: Annotated[int | None, typer.Option(help="Divide larger bags into ones of about this size.")] = None,
    seed: SeedOption = 0,
    workers: WorkersOption = None,
) -> None:
    """Change the witness rate of a cohort with ground truth, or divide its bags (appendix A.4 of the paper)."""
    from its2clr.cohort import Cohort
    from its2clr.cohort.resample import resample_cohort

    summary = resample_cohort(
        Cohort.open(cohort),
        out,
        keep_negatives=keep_negatives,
        keep_positives=keep_positives,
        negative_bags=all_bags,
        sub_bag_size=sub_bag_size,
        seed=seed,
        workers=workers,
    )
    console.print(
        f"{out}: {summary.bags} bags, {summary.instances} instances; witness rate "
        f"{summary.witness_rate_before:.3f} -> {summary.witness_rate_after:.3f}",
        soft_wrap=True,
    )


def _draw_synthetic(
    out: Path, size: SizeName, seed: int, workers: int | None, settings: list[str] | None = None
) -> None:
    from its2clr.cohort.synthetic import make_synthetic
    from its2clr.config import parse_override
    from its2clr.engine.progress import ProgressBar

    overrides: dict[str, Any] = dict(parse_override(text) for text in settings or [])
    with ProgressBar(console=console).start("draw", 1, "bags") as progress:
        summary = make_synthetic(out, size=size, seed=seed, workers=workers, progress=progress.reach, **overrides)
    console.print(
        f"{summary.folder}: {summary.bags} bags ({summary.positive_bags} positive), {summary.instances} tiles",
        soft_wrap=True,
    )


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _folder(path: Path) -> Path:
    if path.is_file():
        raise InputError(f"{path}: is a file; give a folder")
    return path


def _stages(cohort: Path | None, run: Path, recipe: str | None, settings: list[str] | None) -> Any:
    from its2clr.pipeline import open_run

    return open_run(run, cohort, recipe, settings or [])


def _fit(cohort: Path | None, run: Path, recipe: str | None, settings: list[str] | None) -> None:
    _fit_and_evaluate(_stages(cohort, run, recipe, settings))


def _fit_and_evaluate(stages: Any) -> None:
    from its2clr.results.report import reported

    with reported(stages.run.path, stages.engine.say, enabled=stages.engine.is_writer):
        stages.fit()
        _evaluate(stages)


def _evaluate(stages: Any) -> None:
    from its2clr.engine.memory import said_peak_memory
    from its2clr.evaluation.frozen import evaluate, results_rows
    from its2clr.results.export import export_model

    results = evaluate(stages)
    if not stages.engine.is_writer:
        return
    exported = export_model(stages.run.path)
    table = Table(title="Test bags: mean (deviation over retrainings) [95% interval over bags]")
    for heading in ("", "bag AUC", "instance AUC"):
        table.add_column(heading, no_wrap=True)
    for row in results_rows(results):
        table.add_row(*row)
    Console(highlight=False, width=max(console.width, 100)).print(table)
    for warning in results.get("health", {}).get("warnings", ()):
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    stages.engine.say(said_peak_memory(stages.engine.device))
    console.print(f"results in {stages.run.path / 'results.json'}", markup=False, soft_wrap=True)
    console.print(f"model in {exported}: `its2clr predict` needs nothing else", markup=False, soft_wrap=True)


def main() -> None:
    """Run the command line; an error of ours is one message and exit code 2."""
    try:
        app()
    except SystemExit as stop:
        if stop.code == INTERRUPTED and os.environ.get("RANK", "0") == "0":
            Console(stderr=True, highlight=False).print("stopped; the same command goes on where it stopped")
        raise
    except KeyboardInterrupt:  # a second one, while the first was being handled
        sys.exit(INTERRUPTED)
    except (Its2clrError, OSError, MemoryError, RuntimeError) as error:
        ours = isinstance(error, Its2clrError | OSError | MemoryError)
        if "--debug" in sys.argv or not (ours or "out of memory" in str(error)):
            raise
        advice = "" if ours else "\nLower pretrain.batch_size, refine.batch_size or engine.extract_batch_size."
        if os.environ.get("RANK", "0") == "0":
            Console(stderr=True, highlight=False).print(f"error: {error}{advice}", markup=False, soft_wrap=True)
        sys.exit(2)
