"""What the campaign counts: tries and failures per part, printed and written as JSON."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign.machine import Ended

LARGEST_SHOWN = 40


@dataclass
class Part:
    """One part of the campaign.

    Attributes:
        name: Of the part.
        tries: How often something was tried, by what was tried.
        failures: What went wrong, by kind: each with the try and what was seen.
        seconds: How long the part ran.
        slowest: Seconds of the slowest command.
        peak: Most bytes of a command.
        notes: Other numbers.
    """

    name: str
    tries: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0
    peak: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def tried(self, what: str, count: int = 1) -> None:
        """Count tries."""
        self.tries[what] = self.tries.get(what, 0) + count

    def failed(self, what: str, why: str) -> None:
        """Keep a failure and print it."""
        kinds = {"hung": "hang", "traceback": "traceback", "took": "memory", "outside": "outside", "result": "result"}
        kind = kinds.get(why.split(maxsplit=1)[0].rstrip(":"), "other")
        self.failures.append({"kind": kind, "try": what, "seen": why[-1500:]})
        print(f"{self.name}: {what} FAILED: {why}", flush=True)

    def ended(self, what: str, end: Ended, allowed: tuple[int, ...] = ()) -> bool:
        """Note how a command ended; returns whether it ended as it should, or with a code that is allowed here."""
        self.slowest, self.peak = max(self.slowest, end.seconds), max(self.peak, end.peak)
        complaint = end.complaint()
        if complaint is not None and not (end.code in allowed and not end.hung):
            self.failed(what, complaint)
            return False
        return True

    def summary(self) -> dict[str, Any]:
        """For the JSON."""
        kinds = ("traceback", "hang", "memory", "result", "outside", "other")
        return {
            "tries": sum(self.tries.values()),
            "failures": len(self.failures),
            "failures_by_kind": {kind: sum(one["kind"] == kind for one in self.failures) for kind in kinds},
            "seconds": round(self.seconds),
            "slowest_seconds": round(self.slowest, 1),
            "largest_bytes": self.peak,
            "tried": dict(sorted(self.tries.items())),
            **self.notes,
            "failed": self.failures[:LARGEST_SHOWN],
        }


def combined(before: Any, now: Any, key: str = "") -> Any:
    """Two summaries of one part as one: counts are added, extremes kept, seeds and states of the code listed."""
    if isinstance(before, dict):
        both = {name: combined(before[name], now[name], name) for name in before if name in now}
        return {**before, **now, **both}
    if isinstance(before, list):
        return before + [one for one in now if one not in before]
    if key in {"seed", "commit"}:
        return f"{before}, {now}"
    if key in {"slowest_seconds", "largest_bytes", "collectives", "tmpfs", "peak_bytes"}:
        return max(before, now)
    return before + now if isinstance(before, int | float) and key not in {"file_bytes", "refused"} else now


class Clock:
    """Says how long a part may still go on; at least one round is always made.

    Args:
        seconds: For the part.
        part: Whose tries are counted.
        goal: Tries that the part should reach, for which it may take half as long again.
    """

    def __init__(self, seconds: float, part: Part | None = None, goal: float = 0) -> None:
        self._begun = time.monotonic()
        self._seconds, self._part, self._goal = seconds, part, goal

    def over(self) -> bool:
        """Whether the time is up."""
        enough = self._part is None or sum(self._part.tries.values()) >= self._goal
        return self.passed() > self._seconds * (1 if enough else 1.5)

    def passed(self) -> float:
        """Seconds since the part began."""
        return time.monotonic() - self._begun


def write(path: Path, about: dict[str, Any], parts: dict[str, Any]) -> None:
    """Write the JSON."""
    found = {**about, "parts": parts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show(parts: list[Part]) -> None:
    """Print tries and failures per part."""
    print(f"{'part':<12}{'tries':>8}{'failures':>10}{'slowest':>10}{'most memory':>13}")
    for part in parts:
        tries, gigabytes = sum(part.tries.values()), part.peak / 1e9
        print(f"{part.name:<12}{tries:>8}{len(part.failures):>10}{part.slowest:>9.1f}s{gigabytes:>10.2f} GB")
