"""Run the benchmarks and turn them into ratios: what a user of this machine can expect."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from its2clr.bench.measure import COMMON_WAYS, SIZES, Bench, hardware
from its2clr.bench.recipes import (
    FASTEST,
    LIMITS,
    PAPER_RECIPE,
    RATES,
    measure_recipes,
    paper_hours,
    recipe_configs,
    recipe_ratios,
)
from its2clr.config import RunConfig
from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.files import atomic_path
from its2clr.version import __version__

GROUPS: dict[str, dict[str, Callable[[Bench], dict[str, Any]]]] = {
    "rates": {
        "images_per_second": lambda bench: bench.training() | bench.extraction(),
        "views_per_second": Bench.views,
    },
    "aggregators": {"aggregator_seconds_per_epoch": Bench.aggregators, "update_seconds": Bench.update},
    "scaling": {"scaling_seconds": Bench.scaling},
    "agreement": {"agreement_of_loss": Bench.agreement},
    "recipes": {},  # those that are asked for
}
"""What is measured together: every ratio lies within one group, so within one run."""


def run_benchmarks(
    size: str,
    config: RunConfig | None = None,
    say: Callable[[str], None] = lambda _: None,
    groups: Collection[str] = tuple(GROUPS),
    recipes: Mapping[str, RunConfig] | None = None,
) -> dict[str, Any]:
    """Measure at one size.

    Args:
        size: "full" or "small" (a CPU); "tiny" tries the code only.
        config: Settings; the defaults are the paper's. The network is compiled on a GPU unless they say otherwise.
        say: Told what was measured, line by line.
        groups: Names of `GROUPS`.
        recipes: Settings of the recipes that the group of that name measures; None: those of the package.

    Returns:
        What was measured, by kind, and `ratios`.
    """
    config = config or RunConfig()
    engine = Engine(config.engine)
    if engine.device.type == "cuda" and config.engine.compile == "auto":
        engine = Engine(config.engine.model_copy(update={"compile": "always"}))
    engine.bars.enabled = False
    bench = Bench(SIZES[size], engine, config)
    found: dict[str, Any] = {"its2clr": __version__, "hardware": hardware(engine), "size": size}
    for kind, measure in (item for group in GROUPS if group in groups for item in GROUPS[group].items()):
        found[kind] = measure(bench)
        say(f"{kind.replace('_', ' ')}:")
        for name, value in found[kind].items():
            say(f"  {name}: {_readable(value)}")
    if "recipes" in groups:
        found["recipes"] = measure_recipes(bench, recipe_configs([], []) if recipes is None else recipes)
        for recipe, measured in found["recipes"].items():
            say(f"{recipe}, images per second: {_readable(measured[RATES])}")
    return with_ratios(found)


def joined(earlier: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """An earlier measurement with some groups measured again.

    Raises:
        InputError: It is of another version, machine or size.
    """
    for what in ("its2clr", "hardware", "size"):
        if earlier[what] != found[what]:
            raise InputError(
                f"the file holds measurements of another {what} ({earlier[what]}, now {found[what]}): "
                "leave --only away, or give another --out"
            )
    recipes = {**earlier.get("recipes", {}), **found.get("recipes", {})}
    return with_ratios({**earlier, **found} | ({"recipes": recipes} if recipes else {}))


def with_ratios(found: dict[str, Any]) -> dict[str, Any]:
    """What was measured, with ratios and the hours that the paper's run on Camelyon16 would take."""
    found = {**found, "ratios": ratios(found)}
    if "recipes" in found:
        found["ratios_of_recipes"] = recipe_ratios(found["recipes"])
        if PAPER_RECIPE in found["recipes"]:
            aggregator = found.get("update_seconds", {}).get("aggregator")
            found["hours_of_the_paper"] = paper_hours(found["recipes"], aggregator)
    return found


def recipe_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for every recipe and stage: rate, and its shares of the bare network and of the fastest of that shape."""
    rows: list[tuple[str, ...]] = []
    for recipe, shares in found["ratios_of_recipes"].items():
        for stage, limit in LIMITS.items():
            rate = found["recipes"][recipe][RATES][stage]
            own, fastest = (shares[f"{stage} / {limit}{suffix}"] for suffix in ("", FASTEST))
            rows.append((recipe, stage, f"{rate:,.0f}", f"{own:.2f}", f"{fastest:.2f}"))
    return rows


RECIPE_HEADINGS = ("recipe", "stage", "images/s", "of its bare network", "of the fastest of that shape")


def _readable(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {number:.4g}" for name, number in value.items())
    return f"{value:.4g}" if value < 10_000 else f"{value:,.0f}"


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Each stage against its limit: the bare training step, compiled where that was measured."""
    result: dict[str, float] = {}
    if "images_per_second" in found:
        rates, views = found["images_per_second"], found["views_per_second"]
        limit = rates.get("bare training, compiled", rates["bare training"])
        of_limit = ("SimCLR epoch", "SimCLR epoch from host memory", "refinement epoch")
        result |= {f"{name} / bare training step": rates[name] / limit for name in of_limit if name in rates}
        result["extraction / bare inference"] = rates["extraction"] / rates["bare inference"]
        result["views / bare training step"] = views["ours"] / limit
        result |= {f"views / {name}": views["ours"] / rate for name, rate in views.items() if name != "ours"}
        result |= {f"SimCLR epoch / {way}": rates["SimCLR epoch"] / rates[way] for way in COMMON_WAYS}
    if "aggregator_seconds_per_epoch" in found:
        seconds = found["aggregator_seconds_per_epoch"]
        result["plain aggregator loop / ours, one seed"] = seconds["plain loop"] / seconds["1 seed"]
        result["ours, five seeds / one seed"] = seconds["5 seeds"] / seconds["1 seed"]
    return result


def plot_scaling(found: dict[str, Any], path: str | Path) -> None:
    """Seconds over size, one panel per stage, beside a line of linear growth through the largest size."""
    from matplotlib.figure import Figure

    kinds = found["scaling_seconds"]
    figure = Figure(figsize=(3.4 * len(kinds), 3), layout="constrained")
    for axes, (name, seconds) in zip(figure.subplots(1, len(kinds)), kinds.items(), strict=True):
        stage, unit = name.split(", ")
        sizes = [int(size) for size in seconds]
        largest = max(sizes)
        axes.plot([0, largest], [0, seconds[str(largest)]], color="0.7", linestyle="--", label="linear")
        axes.plot(sizes, list(seconds.values()), "o", label="measured")
        axes.set(title=stage, xlabel=unit, ylabel="seconds", xlim=(0, None), ylim=(0, None))
        axes.legend(frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
