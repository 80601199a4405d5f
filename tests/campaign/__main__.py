"""`python -m tests.campaign --minutes 60`: attack every command for so long; prints tries and failures per part.

Parts can be run alone (`--part kills`); the JSON then keeps what it holds of the others. The exit code is 1 if
anything failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.campaign.damage import inputs
from tests.campaign.full_disk import full_disk
from tests.campaign.kills import kills
from tests.campaign.machine import warm_up
from tests.campaign.places import make
from tests.campaign.ranks import ranks
from tests.campaign.stale import stale
from tests.campaign.tally import Clock, Part, combined, show, write
from tests.campaign.viewer_client import viewer

PARTS = {
    "kills": (kills, 0.50, 200),
    "inputs": (inputs, 0.16, 10_000),
    "full disk": (full_disk, 0.08, 0),
    "stale": (stale, 0.06, 0),
    "ranks": (ranks, 0.18, 0),
    "viewer": (viewer, 0.02, 0),
}
"""The parts, their share of the time, and the tries that an hour should reach."""


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part, for all the minutes")
    parser.add_argument("--short", action="store_true", help="a few tries of each part but ranks, which takes long")
    parser.add_argument("--add", action="store_true", help="add to what the JSON holds of the part")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/campaign.json"))
    options = parser.parse_args()
    chosen = options.part or [name for name in PARTS if not (options.short and name == "ranks")]
    seed = options.seed if options.seed is not None else int(time.time())
    shares = {name: PARTS[name][1] for name in chosen}
    state = commit()
    warm_up()
    parts = []
    folder = tempfile.mkdtemp(prefix="its2clr-campaign-")  # no TemporaryDirectory: forked processes would remove it
    try:
        places = make(Path(folder))
        for name in chosen:
            minutes = 0.0 if options.short else options.minutes * shares[name] / sum(shares.values())
            part = Part(name)
            clock = Clock(60 * minutes, part, PARTS[name][2] * options.minutes / 60)
            before = _processor_seconds()
            PARTS[name][0](places, part, clock, seed, short=options.short)
            part.seconds = clock.passed()
            part.notes |= {"seed": seed, "commit": state, "processor_seconds": round(_processor_seconds() - before)}
            parts.append(part)
            _keep(options.json, part, add=options.add)
            done = f"{sum(part.tries.values())} tries, {len(part.failures)} failures, {part.seconds:.0f} s"
            print(f"{name}: {done}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(parts)
    return int(any(part.failures for part in parts))


def commit() -> str:
    """The state of the code."""
    root = Path(__file__).parent
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _keep(path: Path, part: Part, *, add: bool) -> None:
    found = json.loads(path.read_text())["parts"] if path.is_file() else {}
    found[part.name] = combined(found[part.name], part.summary()) if add and part.name in found else part.summary()
    kinds = {kind: sum(one["failures_by_kind"][kind] for one in found.values()) for kind in _kinds(found)}
    write(
        path,
        {
            "machine": {"python": sys.version.split()[0], "processors": os.cpu_count(), "system": sys.platform},
            "minutes": round(sum(one["seconds"] for one in found.values()) / 60, 1),
            "tries": sum(one["tries"] for one in found.values()),
            "failures": sum(one["failures"] for one in found.values()),
            "failures_by_kind": kinds,
        },
        found,
    )


def _processor_seconds() -> float:
    """Of this process and of those it started that have ended."""
    return sum(os.times()[:4])


def _kinds(found: dict[str, Any]) -> list[str]:
    return list(next(iter(found.values()))["failures_by_kind"])


if __name__ == "__main__":
    sys.exit(main())
