"""One of two processes under torchrun fails at a collective operation: all end soon, and the next start goes on.

The process fails by an error, by ending without a word, or by `kill -9`. Every line of its2clr that asks for a
collective has its turn, in a random order; of a line that asks often, one time is drawn. After a few failures in a row
the command is let through, and its results are those of one undisturbed.
"""

import json
import os
import re
from pathlib import Path

from tests.campaign.content import content, differences, half_written
from tests.campaign.failing_rank import main
from tests.campaign.machine import HANG_SECONDS, draw_of, fork
from tests.campaign.places import Places, settings
from tests.campaign.tally import Clock, Part

MOST_FAILURES = 4
"""In a row, before the command is let through."""
HUNG = -9
OF_THE_AGENT = re.compile(r"[EW]\d{4} .*/torch/distributed/elastic/\S+\] ?")
"""Starts each line that torchrun's agent logs, tracebacks of its own among them; our processes write none such."""
WAYS = ("raise", "exit", "kill")


def ranks(places: Places, part: Part, clock: Clock, seed: int, *, short: bool = False) -> None:
    """Let processes fail until the time is up."""
    whole = places.new("ranks-whole")
    code, output, seconds = _torchrun(whole, places, None)
    if code:
        part.failed("fit", f"other: ended with {code} undisturbed: {output[-1500:]}")
        return
    expected, called = content(whole / "out"), json.loads((whole / "counted").read_text())
    lines = {line: [number for number, one in enumerate(called) if one == line] for line in sorted(set(called))}
    draw = draw_of(seed, "ranks")
    waiting: list[str] = []
    part.notes |= {"collectives": len(called), "lines": sorted(lines), "commands_let_through": 0}
    seen: set[str] = set()
    while True:
        folder, said = places.new("ranks"), []
        for _ in range(draw.randint(1, MOST_FAILURES)):
            if not waiting:
                waiting = draw.sample(sorted(lines), len(lines))
            line = waiting.pop()
            failure = (draw.randrange(2), draw.choice(lines[line]), draw.choice(WAYS))
            code, output, taken = _torchrun(folder, places, failure, limit=HANG_SECONDS + 3 * seconds)
            part.slowest = max(part.slowest, taken)
            if code == 0:  # a resumed run asks less often
                waiting.append(line)  # the first to fail of the next, in which it is reached
                break
            seen.add(line)
            said.append(f"process {failure[0]} by {failure[2]} at collective {failure[1]} ({line})")
            part.tried(failure[2])
            _check(said[-1], code, output, failure[2], part)
            if clock.over() and len(seen) == len(lines):
                break
        what = f"fit (seed {seed}): " + ", ".join(said)
        code, output, _ = _torchrun(folder, places, None, limit=HANG_SECONDS + 3 * seconds)
        part.notes["lines_failed_at"] = sorted(seen)
        if code:
            part.failed(what, f"refused to go on, exit code {code}: {output[-1500:]}")
        elif changed := differences(expected, content(folder / "out")):
            part.failed(what, f"result changed: {changed[:8]}")
        elif left := half_written(folder / "out"):
            part.failed(what, f"outside: half written files stay: {left[:4]}")
        part.notes["commands_let_through"] += int(code == 0)
        if clock.over() and len(seen) == len(lines):  # every line has its turn, however long it takes
            return


def _check(what: str, code: int, output: str, how: str, part: Part) -> None:
    if code == HUNG:
        part.failed(what, f"hung: {output[-1500:]}")
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    if how == "raise" and not any("a failure made by the campaign" in line for line in errors):
        part.failed(what, f"other: does not say what failed: {output[-1500:]}")
    ours = "\n".join(line for line in output.splitlines() if not OF_THE_AGENT.match(line))
    if "Traceback (most recent call last)" in ours:
        part.failed(what, f"traceback: {ours[-1500:]}")


def _torchrun(
    folder: Path, places: Places, failure: tuple[int, int, str] | None, limit: float = 10 * HANG_SECONDS
) -> tuple[int, str, float]:
    """Run a fit in two processes that torchrun's agent forks, so that they import nothing; the code may be HUNG."""
    words = [
        "fit", str(places.cohort), "--out", str(folder / "out"), *settings(), "--set", "refine.epochs=2", "--set",
        "pretrain.epochs=1", "--set", "evaluation={retrainings: 1, bootstrap: 20}",
    ]  # fmt: skip

    def work() -> int:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        os.environ["CAMPAIGN_COUNTED"] = str(folder / "counted")
        names = ("CAMPAIGN_RANK", "CAMPAIGN_COLLECTIVE", "CAMPAIGN_HOW")
        os.environ.update(zip(names, map(str, failure or ()), strict=False))
        config = LaunchConfig(
            1, 1, 2, run_id="campaign", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
            monitor_interval=0.1, start_method="fork",
        )  # fmt: skip
        try:
            elastic_launch(config, main)(words)
        except ChildFailedError:
            return 1
        return 0

    ended = fork(work, folder, limit=limit)
    return HUNG if ended.hung else ended.code, ended.output, ended.seconds
