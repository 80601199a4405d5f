"""Runs the benchmarks and puts them into ratios: what a user of the machine at hand can expect."""

from typing import Any

from its2clr import __version__
from its2clr.bench.measure import SIZES, Bench, hardware
from its2clr.config import EngineConfig
from its2clr.engine.devices import Engine


def run_benchmarks(size: str, engine_settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Measure everything at one size.

    Args:
        size: "full" or "small" (a CPU); "tiny" tries the code only.
        engine_settings: Section `engine` of the settings.

    Returns:
        `hardware`, `size`, `rates` (images per second; seconds per epoch for aggregators), `ratios`.
    """
    engine = Engine(EngineConfig.model_validate(engine_settings or {}))
    engine.bars.enabled = False
    bench = Bench(SIZES[size], engine)
    rates = bench.training() | bench.extraction()
    aggregators = bench.aggregators()
    return {
        "its2clr": __version__,
        "hardware": hardware(engine),
        "size": size,
        "rates": rates,
        "aggregator_seconds_per_epoch": aggregators,
        "ratios": ratios(rates, aggregators),
    }


def ratios(rates: dict[str, float], aggregators: dict[str, float]) -> dict[str, float]:
    """Each stage against its limit; the compiled training step is the limit where there is one."""
    compiled = rates["bare training, compiled"]
    limit = compiled if compiled == compiled else rates["bare training"]  # noqa: PLR0124 (nan: not compiled here)
    return {
        "SimCLR epoch / bare training step": rates["SimCLR epoch"] / limit,
        "refinement epoch / bare training step": rates["refinement epoch"] / limit,
        "views / bare training step": rates["views"] / limit,
        "SimCLR epoch / common way": rates["SimCLR epoch"] / rates["common way (DataLoader, torchvision)"],
        "extraction / bare inference": rates["extraction"] / rates["bare inference"],
        "plain aggregator loop / ours, one seed": aggregators["plain loop"] / aggregators["1 seed"],
        "ours, five seeds / one seed": aggregators["5 seeds"] / aggregators["1 seed"],
    }
