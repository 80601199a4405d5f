"""Commands that make a cohort: one folder of packed tiles and bag labels."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from its2clr import far
from its2clr.cli.options import (
    AnnotationMppOption,
    AnnotationsRootOption,
    ClusterOption,
    DefaultMppOption,
    FractionsOption,
    ImagesRootOption,
    NewCohortArgument,
    PositiveOption,
    QualityOption,
    ResizeOption,
    SeedOption,
    SetOption,
    SizeOption,
    SlidesRootOption,
    SlurmOption,
    TileSizeOption,
    UnlabelledOption,
    WorkersOption,
    cluster_of,
    cohort_here,
)
from its2clr.cli.output import progress, say
from its2clr.cluster.place import LOCAL
from its2clr.errors import InputError
from its2clr.units import MicronsPerPixel, TilePixels

EncodingName = Literal["jpeg", "png"]


def images(
    manifest: Annotated[
        Path, typer.Argument(help="CSV with bag_id, label and path (a folder of images); or a folder of such folders.")
    ],
    out: NewCohortArgument,
    instances: Annotated[
        Path | None, typer.Option(help="CSV with bag_id, file and, if known, label of each image, instead of paths.")
    ] = None,
    images_root: ImagesRootOption = None,
    positive: PositiveOption = None,
    unlabelled: UnlabelledOption = False,
    tile_size: Annotated[
        int | None,
        typer.Option(help="Side of the stored tiles in pixels. Default: that of the images, between 64 and 224."),
    ] = None,
    encoding: Annotated[EncodingName, typer.Option(help="Format of images that had to be resized.")] = "jpeg",
    quality: QualityOption = 95,
    resize: ResizeOption = "bilinear",
    crop: Annotated[
        Literal["ultrasound"] | None,
        typer.Option(help="Crop ultrasound images to the scan and blacken text, rulers and marks around it."),
    ] = None,
    fractions: FractionsOption = (0.6, 0.15, 0.25),
    seed: SeedOption = 0,
    workers: WorkersOption = None,
) -> None:
    """Pack bags of ordinary images. Every image is checked; those that cannot be read are listed in problems.csv.

    A folder in place of MANIFEST holds one folder of images per bag; its bags have no labels, and can be predicted.
    """
    from its2clr.cohort import pack_images, read_manifest
    from its2clr.predict.new_cohort import images_of_folder

    if far.is_folder(manifest):
        bags = images_of_folder(manifest)
    else:
        bags = read_manifest(manifest, instances, images_root, labelled=not unlabelled, positive=positive or [])
    with progress("pack", len(bags.bags), "bags") as bar:
        summary = pack_images(
            bags,
            out,
            tile_size=None if tile_size is None else TilePixels(tile_size),
            encoding=encoding,
            quality=quality,
            resize=resize,
            crop=crop,
            workers=workers,
            seed=seed,
            fractions=fractions,
            progress=bar.reach,
        )
    say(
        f"{summary.path}: {summary.n_bags} bags, {summary.n_instances} images; {summary.n_packed} bags packed now, "
        f"{summary.n_skipped} were there; left out: {summary.n_images_left_out} images, "
        f"{len(summary.bags_left_out)} bags" + (" (problems.csv says why)" if summary.n_images_left_out else "")
    )
    for line in summary.remarks():
        say(line)


def slides(
    manifest: Annotated[Path, typer.Argument(help="CSV with one row per slide, see above; or a folder of slides.")],
    out: NewCohortArgument,
    magnification: Annotated[
        float | None, typer.Option(help="Scale of the tiles, e.g. 5, 10 or 20; M stands for 10 / M microns per pixel.")
    ] = None,
    mpp: Annotated[float | None, typer.Option(help="Scale in microns per pixel, instead of --magnification.")] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of the labels, where there are several; empty cells are left out.")
    ] = None,
    positive: PositiveOption = None,
    unlabelled: UnlabelledOption = False,
    tile_size: TileSizeOption = 224,
    overlap: Annotated[int, typer.Option(help="Pixels that neighbouring tiles share.")] = 0,
    resize: ResizeOption = "bilinear",
    min_saturation: Annotated[float, typer.Option(help="Least mean HSV saturation of a tile, 0 to 255.")] = 30.0,
    min_tissue: Annotated[float, typer.Option(help="Least share of a tile's pixels that are that saturated.")] = 0.0,
    skip_glass: Annotated[
        bool,
        typer.Option(
            "--skip-glass/--read-all",
            help="Skip what a coarse level shows as bare glass (tested on each slide), or read every tile.",
        ),
    ] = True,
    default_mpp: DefaultMppOption = None,
    annotation_mpp: AnnotationMppOption = False,
    slides_root: SlidesRootOption = None,
    annotations_root: AnnotationsRootOption = None,
    min_covered: Annotated[
        float,
        typer.Option(
            help="Annotated share from which a tile is positive; with less, but some, it is unknown. 0: any tumour."
        ),
    ] = 0.0,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            help="Annotated class that counts as tumour: a name, or the Id of an ImageScope layer; may be repeated.",
        ),
    ] = None,
    stain: Annotated[
        Literal["macenko", "vahadane"] | None, typer.Option(help="Normalise the stains of every slide.")
    ] = None,
    encoding: Annotated[EncodingName, typer.Option(help="How tiles are stored.")] = "jpeg",
    quality: QualityOption = 95,
    fractions: FractionsOption = (0.6, 0.15, 0.25),
    seed: SeedOption = 0,
    cluster: ClusterOption = LOCAL,
    workers: WorkersOption = None,
    slurm: SlurmOption = None,
) -> None:
    """Tile whole slides: all that OpenSlide reads, TIFF and OME-TIFF. Of a DICOM slide name any one file.

    The manifest is a table like this; `patient`, `split`, `mpp` and `annotation` may be missing. Without `file`, the
    slide in --slides-root that is called as the bag is taken. A folder in place of the manifest: all slides in it, to
    be predicted, without labels.

        bag_id,file,label,patient,split,mpp,annotation

        case-1,scans/case-1.svs,1,p01,train,,case-1.xml

        case-2,scans/case-2.tiff,0,p02,train,0.25,

    The scale of a slide is what its file says, if that is plausible, else column `mpp`, else `--default-mpp`. A slide
    without a scale, or one that cannot be read, is left out and listed in OUT/problems.csv; `its2clr doctor MANIFEST`
    says so before. Look at OUT/overviews to see what was kept. The same command again continues where it stopped.

    Tissue that the coarse levels of a file do not show at all is missed; `--read-all` is slower and misses nothing.

    Example: `its2clr cohort slides slides.csv cohorts/mine --magnification 5 --resize nearest`
    """
    from its2clr.cohort.slides import SlideSettings, pack_slides, read_slide_manifest, target_mpp
    from its2clr.predict.new_cohort import slides_of_folder

    settings = SlideSettings(
        mpp=target_mpp(magnification, mpp),
        tile_size=TilePixels(tile_size),
        overlap=TilePixels(overlap),
        resize=resize,
        min_saturation=min_saturation,
        min_tissue=min_tissue,
        min_covered=min_covered,
        classes=tuple(classes or ()),
        stain=stain,
        default_mpp=None if default_mpp is None else MicronsPerPixel(default_mpp),
        encoding=encoding,
        quality=quality,
        skip_glass=skip_glass,
    )
    place = cluster_of(cluster, workers, slurm)
    if far.is_folder(manifest):
        slides = slides_of_folder(manifest)
    else:
        slides = read_slide_manifest(
            manifest,
            label=label,
            slides_root=slides_root,
            annotations_root=annotations_root,
            labelled=not unlabelled,
            positive=positive or [],
            annotation_scale=annotation_mpp,
        )
    with progress("tile", len(slides.slides), "slides") as bar:
        summary = pack_slides(
            slides,
            out,
            settings,
            cluster=place,
            seed=seed,
            fractions=fractions,
            progress=bar.reach_with("tiles"),
        )
    say("\n".join(summary.lines()))


def features(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[MANIFEST] OUT",
            help="Table with bag_id and label (or a folder of feature files, without labels), and the new cohort.",
        ),
    ],
    features: Annotated[
        Path | None, typer.Option(help="Folder of feature files of TRIDENT, CLAM, STAMP or its2clr.")
    ] = None,
    coords: Annotated[
        Path | None, typer.Option(help="Folder `patches` of CLAM, if it is not beside the features.")
    ] = None,
    slides_root: SlidesRootOption = None,
    from_run: Annotated[
        Path | None, typer.Option(help="Take the features of this run, instead of MANIFEST and --features.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="With --from-run: start, refined or end_to_end.")] = "start",
    positive: PositiveOption = None,
    unlabelled: UnlabelledOption = False,
    fractions: FractionsOption = (0.6, 0.15, 0.25),
    seed: SeedOption = 0,
    workers: WorkersOption = None,
) -> None:
    """Make a cohort of features computed elsewhere; `its2clr fit` then refines an adapter over them.

    The manifest is a table like this; all but `bag_id` and `label` may be missing:

        bag_id,label,group,split,features,file,mpp

        case-1,1,p01,train,,scans/case-1.svs,

        case-2,0,p02,train,case-2_b.h5,,0.25

    The feature file of a bag has its name (`case-1.h5` or `case-1.pt`), unless column `features` says otherwise. Column
    `file` names the slide that maps are drawn on, and `mpp` the microns per pixel of its level 0, which STAMP's
    coordinates need. CLAM's tables are read too: `slide_id` is the bag, `case_id` the group, and `--positive` names the
    labels of class 1. A file that cannot be used is left out and listed in OUT/problems.csv.

    Example: `its2clr cohort features labels.csv cohorts/uni --features trident/20x_256px_0px_overlap/features_uni_v1`

    Of a run's own encoder: `its2clr cohort features cohorts/start --from-run runs/mine --encoder start`
    """
    from its2clr.cohort.features.feature_cohort import pack_features
    from its2clr.cohort.features.feature_manifest import read_feature_manifest
    from its2clr.predict.new_cohort import features_of_folder

    folder = len(paths) == 2 and from_run is None and features is None and far.is_folder(paths[0])
    if not folder and (len(paths) != (2 if from_run is None else 1) or (features is None) == (from_run is None)):
        raise InputError(
            "give `its2clr cohort features MANIFEST OUT --features DIR`, or `... cohort features DIR OUT` for bags "
            "without labels, or `... cohort features OUT --from-run RUN`"
        )
    if from_run is not None:
        from its2clr.run.feature_cohorts import pack_run_features
        from its2clr.run.features import open_run_features

        summary = pack_run_features(open_run_features(from_run), encoder, paths[0])
    else:
        bags = (
            features_of_folder(paths[0])
            if features is None
            else read_feature_manifest(
                paths[0], features, labelled=not unlabelled, slides_root=slides_root, positive=positive or []
            )
        )
        with progress("pack", len(bags.files), "bags") as bar:
            summary = pack_features(
                bags,
                paths[1],
                coords=coords,
                seed=seed,
                fractions=fractions,
                workers=workers,
                progress=bar.reach,
            )
    say("\n".join(summary.lines()))


def synthetic(
    out: NewCohortArgument,
    size: SizeOption = "small",
    seed: SeedOption = 0,
    settings: SetOption = None,
    workers: WorkersOption = None,
) -> None:
    """Draw the embedded cohort: artificial slides with ground truth for every tile."""
    from its2clr.cohort.synthetic.synthetic_cohort import make_synthetic
    from its2clr.settings import parse_override

    overrides: dict[str, Any] = dict(parse_override(text) for text in settings or [])
    with progress("draw", 1, "bags") as bar:
        summary = make_synthetic(out, size=size, seed=seed, workers=workers, progress=bar.reach, **overrides)
    say(f"{summary.folder}: {summary.bags} bags ({summary.positive_bags} positive), {summary.instances} tiles")


def resample(
    cohort: Annotated[
        Path, typer.Argument(help="Folder of a cohort, as `its2clr cohort` makes it.", callback=cohort_here)
    ],
    out: NewCohortArgument,
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
    say(
        f"{out}: {summary.bags} bags, {summary.instances} instances; witness rate "
        f"{summary.witness_rate_before:.3f} -> {summary.witness_rate_after:.3f}"
    )
