"""Runs the benchmarks and puts them into ratios: what a user of the machine at hand can expect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from its2clr import __version__
from its2clr.bench.measure import SIZES, Bench, hardware
from its2clr.config import RunConfig
from its2clr.engine.devices import Engine

PAPER_TILES, PAPER_EPOCHS, PAPER_HOURS = 250_000, 600, 90
"""Camelyon16's SimCLR in the paper (section 4.5)."""


def run_benchmarks(
    size: str, config: RunConfig | None = None, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure everything at one size.

    Args:
        size: "full" or "small" (a CPU); "tiny" tries the code only.
        config: Settings; the defaults are the paper's. The network is compiled on a GPU unless they say otherwise.
        say: Told what was measured, line by line.

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
    kinds: dict[str, Callable[[], Any]] = {
        "images_per_second": lambda: bench.training() | bench.extraction(),
        "views_per_second": bench.views,
        "aggregator_seconds_per_epoch": bench.aggregators,
        "update_seconds": bench.update,
        "scaling_seconds": bench.scaling,
        "agreement_of_loss": bench.agreement,
    }
    for kind, measure in kinds.items():
        found[kind] = measure()
        say(f"{kind.replace('_', ' ')}:")
        for name, value in found[kind].items():
            say(f"  {name}: {_readable(value)}")
    found["ratios"] = ratios(found)
    rate = found["images_per_second"]["SimCLR epoch"]
    found["simclr_600_epochs_of_250000_tiles"] = {
        "hours, projected": PAPER_EPOCHS * PAPER_TILES * 2 / rate / 3600,
        "hours, paper": PAPER_HOURS,
    }
    return found


def _readable(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {number:.4g}" for name, number in value.items())
    return f"{value:.4g}" if value < 10_000 else f"{value:,.0f}"


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Each stage against its limit; the compiled training step is the limit where there is one."""
    rates, views = found["images_per_second"], found["views_per_second"]
    aggregators = found["aggregator_seconds_per_epoch"]
    limit = rates.get("bare training, compiled", rates["bare training"])
    of_limit = ("SimCLR epoch", "SimCLR epoch from host memory", "refinement epoch")
    return {
        **{f"{name} / bare training step": rates[name] / limit for name in of_limit if name in rates},
        "extraction / bare inference": rates["extraction"] / rates["bare inference"],
        "views / bare training step": views["ours"] / limit,
        **{f"views / {name}": views["ours"] / rate for name, rate in views.items() if name != "ours"},
        "SimCLR epoch / common way": rates["SimCLR epoch"] / rates["common way (DataLoader, torchvision)"],
        "plain aggregator loop / ours, one seed": aggregators["plain loop"] / aggregators["1 seed"],
        "ours, five seeds / one seed": aggregators["5 seeds"] / aggregators["1 seed"],
    }


def plot_scaling(found: dict[str, Any], path: str | Path) -> None:
    """Seconds over size, one panel per stage, with the line through the largest size that linear growth would be."""
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
    figure.savefig(path, dpi=150)
