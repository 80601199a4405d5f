"""Commands that check what is there before anything is trained: cohorts, weights and recipes."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from its2clr.cli.options import (
    AnnotationMppOption,
    AnnotationsRootOption,
    DefaultMppOption,
    ImagesRootOption,
    PositiveOption,
    RecipeOption,
    SetOption,
    SlidesRootOption,
    UnlabelledOption,
    cohort_here,
)
from its2clr.cli.output import console, say
from its2clr.units import MicronsPerPixel


def doctor(
    path: Annotated[
        Path,
        typer.Argument(
            help="Folder of a cohort, or a manifest CSV: of images, slides or features.", callback=cohort_here
        ),
    ],
    instances: Annotated[Path | None, typer.Option(help="Instances CSV of the manifest.")] = None,
    images_root: ImagesRootOption = None,
    features: Annotated[Path | None, typer.Option(help="Folder of the feature files of the manifest.")] = None,
    slides_root: SlidesRootOption = None,
    annotations_root: AnnotationsRootOption = None,
    label: Annotated[str | None, typer.Option(help="Column of the labels of slides, where there are several.")] = None,
    positive: PositiveOption = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="Annotated class that counts as tumour; may be repeated.")
    ] = None,
    default_mpp: DefaultMppOption = None,
    annotation_mpp: AnnotationMppOption = False,
    unlabelled: UnlabelledOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip decoding every image.")] = False,
) -> None:
    """Check a cohort or a manifest and say what is wrong; exits 1 if there is an error.

    Every tile file of a cohort is read and compared with what was packed, even if its size and time are unchanged.

    Of a manifest of slides every slide is opened: is its scale known, can its annotation be read, which classes are
    annotated? Of a manifest of features every file is read. Give the options that packing will get.

    Example: `its2clr doctor slides.csv --slides-root scans --class Tumor`
    """
    from its2clr.cohort import examine
    from its2clr.cohort.findings import SlideQuestions

    findings = examine(
        path,
        decode=not quick,
        instances=instances,
        images_root=images_root,
        labelled=not unlabelled,
        positive=positive or [],
        features=features,
        slides=SlideQuestions(
            label=label,
            slides_root=slides_root,
            annotations_root=annotations_root,
            default_mpp=None if default_mpp is None else MicronsPerPixel(default_mpp),
            annotation_scale=annotation_mpp,
            classes=tuple(classes or ()),
        ),
    )
    colours = {"error": "bold red", "warning": "yellow", "note": "dim"}
    for finding in findings:
        console.print(f"[{colours[finding.level]}]{finding.level:<8}[/] ", end="")
        say(f"{finding.where}: {finding.message}")
    counts = {level: sum(finding.level == level for finding in findings) for level in colours}
    console.print(f"{counts['error']} errors, {counts['warning']} warnings, {counts['note']} notes")
    if counts["error"]:
        raise typer.Exit(1)


def weights(
    source: Annotated[
        str,
        typer.Argument(metavar="FILE", help="File, folder in timm's hub layout, or hub name (`hf-hub:OWNER/NAME`)."),
    ],
    encoder: Annotated[str | None, typer.Option(help="timm name; default: encoder.name of the settings.")] = None,
    norm: Annotated[Literal["batch", "instance"] | None, typer.Option(help="Normalisation layers of a ResNet.")] = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
) -> None:
    """Show which tensors of a file an encoder would take as `encoder.weights`; nothing is changed.

    Exits 2 if they are not weights of this encoder.

    Example: `its2clr weights checkpoints/model.pth --encoder resnet18 --norm instance`
    """
    from its2clr.encoders.foreign import report_weights

    chosen = [f"encoder.{key}={value}" for key, value in (("name", encoder), ("norm", norm)) if value is not None]
    say("\n".join(report_weights(source, recipe, [*chosen, *(settings or [])]).lines()))


def recipes(name: Annotated[str | None, typer.Argument(help="Show every setting of this recipe.")] = None) -> None:
    """List the recipes with what each is for, or every setting of one."""
    import yaml

    from its2clr.settings import recipe_names, recipe_title, resolve_config

    if name is None:
        names = recipe_names()
        width = max(map(len, names))
        say("\n".join(f"{one:<{width}}  {recipe_title(one)}" for one in names))
    else:
        say(yaml.safe_dump(resolve_config(name).model_dump(mode="json"), sort_keys=False))
