"""The command that searches for better settings."""

from pathlib import Path
from typing import Annotated

import typer

from its2clr.cli.options import ClusterOption, SetOption, SlurmOption, cluster_of, cohort_here
from its2clr.cli.output import say
from its2clr.cluster.place import LOCAL
from its2clr.errors import InputError


def tune(
    cohort: Annotated[
        Path | None,
        typer.Argument(help="Folder of a cohort; may be left out for a study that has begun.", callback=cohort_here),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the study; the same command again continues where it stopped.")
    ] = Path("runs/tune"),
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials of the whole study. Default: 30, or any number with --hours.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.0, help="Hours that the commands of this study may take, all together.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Trials at a time, shared out over the GPUs. Default: 1.")
    ] = None,
    cluster: ClusterOption = LOCAL,
    slurm: SlurmOption = None,
    space: Annotated[
        Path | None, typer.Option(help="YAML file with what to search; see above. Default: --show-space shows it.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe to begin with: trial 0, and every setting that is not searched. Default: `standard`."
        ),
    ] = None,
    settings: SetOption = None,
    show_space: Annotated[
        bool, typer.Option("--show-space", help="Print what would be searched, as such a file, and stop.")
    ] = False,
) -> None:
    """Search for better settings of the refinement on validation bags; test labels are never read.

    Trial 0 is the recipe unchanged; the others draw learning rate, threshold, p_+, r_0, r_T, length, temperature, views
    and the aggregator's own option. All share one pretraining. A trial that is worse than the median of the others is
    stopped after a round. You may start the same command several times, also on other machines with the same disk.

    OUT/best.yaml is the best recipe, OUT/report.html shows all trials and which settings mattered, OUT/trials.csv has
    the numbers.

    Example: `its2clr tune cohorts/mine --out runs/tuned --trials 40 --workers 2`, then
    `its2clr fit cohorts/mine --out runs/best --recipe runs/tuned/best.yaml`

    To choose what is searched, write a file with ranges and lists, and give it as --space:

        refine.learning_rate: {low: 0.001, high: 0.3, log: true}

        refine.temperature: [0.07, 0.1, 0.2]
    """
    from its2clr.plugins import allow_named
    from its2clr.tune.study import Study, planned

    allow_named(settings or [])
    if show_space:
        import yaml

        if cohort is None:
            raise InputError("--show-space: name a cohort")
        found = planned(cohort, recipe, settings or [], space)["space"]
        say(yaml.safe_dump(found, default_flow_style=None, sort_keys=False).strip())
        return

    from its2clr.tune.results import PAGE_FILE, RECIPE_FILE, fit_command, summary
    from its2clr.tune.search import tune as tune_

    place = cluster_of(cluster, workers, slurm)
    study = Study.begin(out, cohort, recipe, settings or [], space)
    best = tune_(study, trials=trials, hours=hours, cluster=place)
    say("\n".join(summary(study)))
    say(f"trials in {out / PAGE_FILE}")
    if best is None:
        raise typer.Exit(1)
    say(f"recipe in {out / RECIPE_FILE}; use it with `{fit_command(study)}`")
