"""Commands that train and evaluate: every stage of a run, all of them at once, or one alone."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from its2clr.cli.cohort import synthetic
from its2clr.cli.options import (
    ClusterOption,
    OptionalCohort,
    PositiveOption,
    RecipeOption,
    RunOption,
    SeedOption,
    SetOption,
    SizeOption,
    SlurmOption,
    cluster_of,
    cohort_here,
)
from its2clr.cli.output import print_table, say
from its2clr.cluster.place import LOCAL, Cluster
from its2clr.errors import InputError
from its2clr.launcher import is_first_process

if TYPE_CHECKING:
    from its2clr.run.stages import Stages


def _stages(cohort: Path | None, run: Path, recipe: str | None, settings: list[str] | None) -> "Stages":
    from its2clr.plugins import allow_named
    from its2clr.run.opening import open_run

    allow_named(settings or [])
    return open_run(run, cohort, recipe, settings or [])


def _of_a_run(out: str) -> Callable[[Callable[["Stages"], None]], Callable[..., None]]:
    """Make a command of what is done with the stages of a run: it takes COHORT, --out, --recipe and --set."""

    def decorate(work: Callable[["Stages"], None]) -> Callable[..., None]:
        def command(
            cohort: OptionalCohort = None,
            run: RunOption = Path(out),
            recipe: RecipeOption = None,
            settings: SetOption = None,
        ) -> None:
            work(_stages(cohort, run, recipe, settings))

        command.__name__, command.__doc__ = work.__name__, work.__doc__
        return command

    return decorate


def demo(
    run: RunOption = Path("runs/demo"),
    size: SizeOption = "small",
    recipe: RecipeOption = "demo",
    settings: SetOption = None,
    seed: SeedOption = 0,
) -> None:
    """Draw the embedded cohort, run every stage on it, compare SimCLR with ItS2CLR and draw maps of positive bags.

    Takes a few minutes on two CPU cores. Open OUT/report.html to see how it went; maps are in OUT/maps, numbers in
    OUT/results.json.
    """
    cohort = run / "cohort"
    synthetic(cohort, size, seed)
    fit(cohort, run, recipe, [f"seed={seed}", *(settings or [])])
    if is_first_process():
        from its2clr.maps.sheets import SHEET_BAGS, write_maps
        from its2clr.maps.source import open_source

        source = open_source(run)
        bags = source.choose_bags(None, "test", SHEET_BAGS)
        sheet = write_maps(source, bags, source.usual, run / "maps")
        say(f"maps of {len(bags)} test bags, positive ones first: {sheet}")


def fit(
    cohort: OptionalCohort = None,
    run: RunOption = Path("runs/fit"),
    recipe: RecipeOption = None,
    settings: SetOption = None,
    folds: Annotated[
        int | None,
        typer.Option(
            help="Cross-validate: so many runs, each tested on other bags, so that every bag gets a score of a model "
            "that has not seen it. The cohort's own splits are not used."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --folds: folds at a time, shared out over the GPUs. Default: 1.")
    ] = None,
    cluster: ClusterOption = LOCAL,
    slurm: SlurmOption = None,
) -> None:
    """Run every stage: pretrain, aggregate, refine, aggregate, evaluate; and write OUT/report.html.

    Example: `its2clr fit cohorts/mine --out runs/mine`

    Cross-validation: `its2clr fit cohorts/mine --out runs/folds --folds 5`. Groups, such as patients, stay in one fold.
    OUT/out_of_fold holds the scores, OUT/model.its2clr the models of all folds as one.
    """
    from its2clr.crossval.study import is_study

    if folds is not None or is_study(run):
        place = cluster_of(cluster, workers, slurm)
        _cross_validate(run, cohort, folds, recipe, settings or [], place)
        return
    if cluster != LOCAL or workers is not None:
        raise InputError(
            "--workers and --cluster spread folds, so they need --folds; for several GPUs use torchrun or srun"
        )
    _fit_and_evaluate(_stages(cohort, run, recipe, settings))


def _cross_validate(
    out: Path, cohort: Path | None, folds: int | None, recipe: str | None, settings: list[str], cluster: Cluster
) -> None:
    from its2clr.crossval.page import PAGE_FILE, results_rows, summary
    from its2clr.crossval.study import open_study
    from its2clr.crossval.train import cross_validate
    from its2clr.plugins import allow_named
    from its2clr.predict.model_file import MODEL_FILE
    from its2clr.predict.prediction_folder import OUT_OF_FOLD

    allow_named(settings)
    study = open_study(out, cohort, folds, recipe, settings)
    results = cross_validate(study, cluster=cluster, ask=_asks())
    if not is_first_process():
        return
    columns = ("", "bag AUC", "instance AUC", "bag AUC of the folds")
    print_table("All bags, out of fold [95% interval over groups]", columns, results_rows(results))
    for line in summary(results):
        say(line)
    say(f"page in {study.path / PAGE_FILE}, scores in {study.path / OUT_OF_FOLD}")
    say(f"model of all folds in {study.path / MODEL_FILE}")


@_of_a_run("runs/fit")
def pretrain(stages: "Stages") -> None:
    """Train an encoder to start from on the training tiles; writes OUT/checkpoints/encoder-start.safetensors.

    The method is SimCLR; `--set pretrain.method=moco` (or byol, dino, bag_labels) chooses another.
    """
    stages.pretrain()


def extract(
    cohort: OptionalCohort = None,
    run: RunOption = Path("runs/fit"),
    encoder: Annotated[str, typer.Option(help="start, refined or end_to_end.")] = "refined",
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Write the features of every bag (TRIDENT layout) to OUT/features/ENCODER."""
    from its2clr.cohort import Cohort

    stages = _stages(cohort, run, recipe, settings)
    unlabelled = Cohort.open(stages.run.cohort).without_labels()
    for split in sorted(set(unlabelled.bags["split"])):
        stages.features(encoder, unlabelled.split(split))
    stages.engine.say(f"extract: {len(unlabelled)} bags in {stages.run.path / 'features' / encoder}")


def aggregate(
    cohort: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a cohort, or with --labels of feature files; may be left out for a run that has begun.",
            callback=cohort_here,
        ),
    ] = None,
    run: RunOption = Path("runs/fit"),
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Encoder of the features: start, refined or end_to_end. Default: refined; for a new run on a cohort "
            "of features, those features."
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="Table with bag_id and label: COHORT is a folder of feature files (TRIDENT, CLAM, STAMP)."),
    ] = None,
    coords: Annotated[
        Path | None, typer.Option(help="With --labels: folder `patches` of CLAM, if not beside the features.")
    ] = None,
    positive: PositiveOption = None,
    aggregators: Annotated[
        list[str] | None,
        typer.Option("--aggregator", help="Aggregator, instead of the run's; may be repeated to compare several."),
    ] = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Train the aggregator on an encoder's frozen features, once per retraining seed.

    To compare several: `its2clr aggregate --out runs/mine --aggregator max --aggregator transformer`, then
    `its2clr evaluate runs/mine`.

    On features computed elsewhere: `its2clr aggregate features_uni_v1/ --labels labels.csv --out runs/uni`.
    """
    if labels is not None:
        from its2clr.run.feature_cohorts import cohort_of_features

        if cohort is None:
            raise InputError("--labels: name the folder of feature files, `its2clr aggregate FEATURES --labels TABLE`")
        cohort = cohort_of_features(cohort, labels, run, coords, say, positive or [])
    stages = _stages(cohort, run, recipe, settings)
    chosen = encoder or stages.usual_encoder()
    for name in aggregators or [stages.config.aggregator.name]:
        stages.aggregate(chosen, name)


@_of_a_run("runs/fit")
def refine(stages: "Stages") -> None:
    """Algorithm 1: refine the pretrained encoder with pseudo labels (pretrains first if needed)."""
    stages.refine()


def correct(
    run: Annotated[Path, typer.Argument(help="Folder of the run that was corrected.")],
    corrections: Annotated[Path, typer.Argument(help="Folder with a GeoJSON file per corrected bag.")],
    out: Annotated[Path, typer.Option(help="Folder of the new run.")],
    encoder: Annotated[str, typer.Option(help="Encoder to start from: refined or start.")] = "refined",
) -> None:
    """Refine again with a person's corrections: tiles marked as truly positive or negative are trusted.

    In QuPath, give areas or tiles the class `Confirmed positive` or `Confirmed negative` and export each slide as
    GeoJSON, named like its bag. Only training bags count. The new run keeps the cohort and settings of RUN.

    Example: `its2clr correct runs/mine corrections/ --out runs/corrected`
    """
    from its2clr.run.opening import open_corrected

    _fit_and_evaluate(open_corrected(run, corrections, out, encoder))


@_of_a_run("runs/end-to-end")
def end_to_end(stages: "Stages") -> None:
    """Train encoder and aggregator together on whole bags, from SimCLR weights or from scratch: a baseline.

    From scratch: `--set end_to_end.start=scratch`. From the weights of another run: `--set pretrain.start=runs/mine`.
    For large bags, `--set end_to_end.tiles_per_pass=64` keeps the activations of only 64 tiles in memory at a time.
    """
    stages.end_to_end()
    _evaluate(stages)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the machine, e.g. `--set engine.accelerator=cpu`; may be repeated."),
    ] = None,
) -> None:
    """Measure a finished run on its test bags. No stage before this one reads a test label."""
    _evaluate(_stages(None, run, None, settings))


def _asks() -> Callable[[str], bool] | None:
    """Asks a person, where one sits there."""
    return typer.confirm if sys.stdin.isatty() and sys.stdout.isatty() else None


def _fit_and_evaluate(stages: "Stages") -> None:
    from its2clr.report import reported

    stages.ask = _asks()
    with reported(stages.run.path, stages.engine.say, enabled=stages.engine.is_writer):
        stages.fit()
        _evaluate(stages)


def _evaluate(stages: "Stages") -> None:
    from its2clr.engine.memory import said_peak_memory
    from its2clr.predict.model_of_run import export_model
    from its2clr.run.evaluation import evaluate
    from its2clr.run.results_file import results_rows

    results = evaluate(stages)
    if not stages.engine.is_writer:
        return
    exported = export_model(stages.run.path)
    title = "Test bags: mean (deviation over retrainings) [95% interval over bags]"
    print_table(title, ("", "bag AUC", "instance AUC"), results_rows(results))
    for warning in results.get("health", {}).get("warnings", ()):
        say(f"warning: {warning}")
    stages.engine.say(said_peak_memory(stages.engine.device))
    say(f"results in {stages.run.path / 'results.json'}")
    say(f"model in {exported}: all that `its2clr predict` needs")
