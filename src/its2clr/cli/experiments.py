"""Commands that measure: the method against the paper, the stages against the machine."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from its2clr.cli.options import ClusterOption, SetOption, SlurmOption, cluster_of
from its2clr.cli.output import print_table, say
from its2clr.cluster.place import LOCAL


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Labels (`--list` shows them), `all`, or a YAML file.")
    ] = None,
    cohort: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of a cohort, or `DATASET=FOLDER` for one dataset of the paper (camelyon16, breast-ultrasound, "
            "tcga-egfr, ...); may be repeated. Default: the embedded cohort, of the budget's size."
        ),
    ] = None,
    budget: Annotated[
        Literal["smoke", "quick", "paper"],
        typer.Option(help="How much to train; smoke takes minutes and only shows that all works."),
    ] = "quick",
    seeds: Annotated[int | None, typer.Option(min=1, help="Training seeds; default: the budget's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and tables; finished runs are not trained again.")] = Path(
        "runs/reproduce"
    ),
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time. Default: one per GPU, two on a CPU; with Slurm one."),
    ] = None,
    cluster: ClusterOption = LOCAL,
    slurm: SlurmOption = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe to use instead of the budget's settings.")] = None,
    settings: SetOption = None,
    no_train: Annotated[
        bool, typer.Option("--no-train", help="Train nothing; make the tables from finished runs.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the settings of every cell as YAML, and stop; needs no cohort.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the tables and figures, and stop.")] = False,
) -> None:
    """Make tables and figures of the paper on your cohort, beside the paper's numbers.

    A run that several of them need is trained once, and kept for the next call. Each table or figure becomes a
    folder with README.md, table.csv, result.json and plot.png; `results.md` shows all that were asked for.
    Exits 1 when a run failed.

    Example: `its2clr reproduce tab:aggregator_results fig:training_process --cohort cohorts/mine --seeds 3`
    """
    from its2clr.experiments.spec import experiments, select

    if list_ or not names:
        say("\n".join(f"{spec.label:<24} {spec.title}" for spec in experiments().values()))
        return
    specs = select(names)

    from its2clr.settings import parse_override

    overrides = dict(parse_override(text) for text in settings or [])
    if plan:
        from its2clr.experiments.plan import Planner, parse_cohorts
        from its2clr.experiments.shown_plan import shown_plan
        from its2clr.experiments.spec import read_budget

        chosen = read_budget(budget)
        planner = Planner(chosen, parse_cohorts(cohort) if cohort else {"": Path("COHORT")}, recipe, overrides, out)
        typer.echo(shown_plan(specs, planner, seeds or chosen.seeds), nl=False)
        return

    from its2clr.experiments.plan import parse_cohorts
    from its2clr.experiments.reproduce import default_workers, embedded_cohort
    from its2clr.experiments.reproduce import reproduce as reproduce_
    from its2clr.plugins import allow_named

    allow_named(settings or [])
    here = cluster == LOCAL and workers is None and not no_train
    place = cluster_of(cluster, default_workers() if here else workers, slurm)
    page, failed = reproduce_(
        names,
        parse_cohorts(cohort) if cohort else {"": embedded_cohort(budget, out)},
        out,
        budget=budget,
        seeds=seeds,
        cluster=place,
        recipe=recipe,
        overrides=overrides,
        train=not no_train,
        say=say,
    )
    say(f"page: {page}")
    if failed:
        say(f"{failed} run(s) failed; {out / 'problems.csv'} says why")
        raise typer.Exit(1)


def bench(
    size: Annotated[
        Literal["small", "full"] | None, typer.Option(help="Default: full on a GPU, small on a CPU.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write; a plot of seconds over size goes beside it.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="rates, aggregators, scaling, agreement or recipes; may be repeated. What else --out holds is kept."
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Recipe to measure with its network and settings; may be repeated. Default: all of the package."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="e.g. engine.compile=never or encoder.name=resnet50.")
    ] = None,
) -> None:
    """Measure how close the stages come to what this machine can do at best; takes minutes."""
    import torch

    from its2clr.bench.recipes import recipe_configs
    from its2clr.bench.report import GROUPS, RECIPE_HEADINGS, joined, plot_scaling, recipe_rows, run_benchmarks
    from its2clr.files import read_json, write_json
    from its2clr.settings import resolve_config

    chosen = size or ("full" if torch.cuda.is_available() else "small")
    config = resolve_config(None, settings or [])
    groups = only or list(GROUPS)
    if unknown := set(groups) - set(GROUPS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not one of {', '.join(GROUPS)}", param_hint="--only")
    found = run_benchmarks(chosen, config, say, groups, recipe_configs(recipe or [], settings or []))
    if out is not None:
        found = joined(read_json(out), found) if only and out.exists() else found
        write_json(out, found)
        if "scaling_seconds" in found:
            plot_scaling(found, out.with_suffix(".png"))
    title = f"{found['hardware']['device']}, {found['hardware']['precision']}, size {chosen}"
    print_table(title, ("", "ratio"), [(name, f"{value:.2f}") for name, value in found["ratios"].items()])
    if update := found.get("update_seconds"):
        say(f"one pseudo-label update on {update['tiles']:.0f} tiles: {update['update']:.1f} s")
    if "recipes" in found:
        print_table("Recipes", RECIPE_HEADINGS, recipe_rows(found))
    for part, hours in found.get("hours_of_the_paper", {}).items():
        projected, paper = hours["projected"], hours["paper"]
        say(f"Camelyon16 as in the paper, {part}: {projected:.3g} h at this rate; in the paper {paper:.3g} h")
