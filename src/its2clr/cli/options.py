"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from its2clr import far
from its2clr.cluster.place import Cluster


def cohort_here(path: Path | None) -> Path | None:
    """A cohort that was named by address, fetched; a table is read where it is."""
    if path is None or not far.is_far(path):
        return path
    from its2clr.cohort.tables import TABLES

    return path if path.suffix.lower() in TABLES else far.folder_here(path)


OptionalCohort = Annotated[
    Path | None,
    typer.Argument(help="Folder of a cohort; may be left out for a run that has begun.", callback=cohort_here),
]
RunOption = Annotated[
    Path, typer.Option("--out", help="Folder of the run; the same command again continues where it stopped.")
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        help="Name of a recipe (`its2clr recipes` lists them) or a YAML file. Default: the settings of the run; for a "
        "new run `standard`, or `features` on a cohort of features."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting, e.g. `--set refine.epochs=20`; may be repeated."),
]
MachineSetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the machine, e.g. `--set engine.accelerator=cpu`, or `plugins`."),
]
SeedOption = Annotated[int, typer.Option(help="Seed of every random choice.")]
WorkersOption = Annotated[int | None, typer.Option(help="Parallel workers; default: all cores.")]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="Where: `local`, `slurm` (jobs of Slurm, see --slurm), or the address of a Dask scheduler, e.g. "
        "tcp://node:8786.",
    ),
]
SlurmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm",
        metavar="KEY=VALUE",
        help="What a job of Slurm asks for: partition, account, time, memory, cores, gpu, workers (in a job), "
        "interface, directives, prologue, folder; may be repeated.",
    ),
]

NewCohortArgument = Annotated[Path, typer.Argument(help="Folder of the new cohort.")]
SizeOption = Annotated[
    Literal["tiny", "small", "medium", "large"],
    typer.Option(help="Size of the cohort: small suits a CPU, medium and large a GPU."),
]
UnlabelledOption = Annotated[
    bool, typer.Option("--unlabelled", help="The manifest has no labels: the bags are only to be predicted.")
]
ImagesRootOption = Annotated[Path | None, typer.Option(help="Folder of the files that the instances CSV names.")]
TileSizeOption = Annotated[int, typer.Option(help="Side of the stored tiles in pixels.")]
ResizeOption = Annotated[Literal["bilinear", "nearest", "bicubic"], typer.Option(help="How images are resized.")]
QualityOption = Annotated[int, typer.Option(help="JPEG quality.")]
FractionsOption = Annotated[
    tuple[float, float, float], typer.Option(help="Shares of train, val and test, where the manifest has no splits.")
]
PositiveOption = Annotated[
    list[str] | None,
    typer.Option(help="Label in words that means 1, such as `tumor`; all others mean 0. May be repeated."),
]
SlidesRootOption = Annotated[Path | None, typer.Option(help="Folder of the slides; default: the manifest's.")]
AnnotationsRootOption = Annotated[Path | None, typer.Option(help="Folder of the annotations; default: the manifest's.")]
AnnotationMppOption = Annotated[
    bool,
    typer.Option(
        "--annotation-mpp",
        help="Where neither file nor manifest says it, take the scale that the annotation says.",
    ),
]
DefaultMppOption = Annotated[
    float | None, typer.Option(help="Microns per pixel of slides for which neither file nor manifest says it.")
]

ScoredArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of an evaluated run, or of what `its2clr predict` wrote.")
]
BagOption = Annotated[list[str] | None, typer.Option("--bag", help="A bag by its id; may be repeated.")]
ScoredSplitOption = Annotated[
    str | None, typer.Option("--split", help="train, val or test. Default: test; for predictions all bags.")
]
LimitOption = Annotated[
    int,
    typer.Option(min=0, help="At most this many bags, positive (of predictions: likely) ones first; 0: all."),
]
InstanceThresholdOption = Annotated[
    float | None,
    typer.Option(
        "--threshold", min=0, max=1, help="Least probability of a positive tile. Default: the model's own threshold."
    ),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="start, refined or end_to_end, or refined+max for another aggregator; may be repeated."
    ),
]


def cluster_of(where: str, workers: int | None, slurm: list[str] | None) -> Cluster:
    """What --cluster, --workers and --slurm say together."""
    settings = {}
    if slurm:
        from its2clr.cluster.slurm import read_jobs, written_settings

        settings = written_settings(slurm)
        read_jobs(settings)  # what is wrong with them should not wait
    return Cluster(where, workers, settings)
