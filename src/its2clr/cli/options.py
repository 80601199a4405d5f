"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated, Literal

import typer

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
WorkersOption = Annotated[int | None, typer.Option(help="Parallel workers; default: all cores.")]

NewCohortArgument = Annotated[Path, typer.Argument(help="Folder of the new cohort.")]
SizeOption = Annotated[
    Literal["tiny", "small", "medium", "large"],
    typer.Option(help="Size of the cohort: small suits a CPU, medium and large a GPU."),
]
UnlabelledOption = Annotated[
    bool, typer.Option("--unlabelled", help="The manifest has no labels: new bags, to be predicted only.")
]
ImagesRootOption = Annotated[Path | None, typer.Option(help="Folder of the instances' files.")]
TileSizeOption = Annotated[int, typer.Option(help="Side of the stored tiles in pixels.")]
ResizeOption = Annotated[Literal["bilinear", "nearest", "bicubic"], typer.Option(help="How pixels are interpolated.")]
QualityOption = Annotated[int, typer.Option(help="JPEG quality.")]
FractionsOption = Annotated[
    tuple[float, float, float], typer.Option(help="Shares of train, val and test where no split is given.")
]
DefaultMppOption = Annotated[
    float | None, typer.Option(help="Microns per pixel of slides where neither file nor manifest says.")
]

ScoredArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of an evaluated run, or of what `its2clr predict` wrote.")
]
BagOption = Annotated[list[str] | None, typer.Option("--bag", help="A bag by its id; may be repeated.")]
ScoredSplitOption = Annotated[
    str | None, typer.Option("--split", help="train, val or test; default: test, of predictions all.")
]
LimitOption = Annotated[
    int, typer.Option(min=0, help="How many bags at most, positive (of predictions: likely) ones first; 0: all.")
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="start, refined or end_to_end, or with another aggregator refined+max; may be repeated."
    ),
]
