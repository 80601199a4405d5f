"""Started by torchrun's agent: `its2clr` in which one process fails at its n-th collective operation.

Environment: CAMPAIGN_RANK, CAMPAIGN_COLLECTIVE (from 0) and CAMPAIGN_HOW (`raise`, `exit` or `kill`). Without them
nothing fails. The first process writes to CAMPAIGN_COUNTED which line of its2clr called each of its collectives.
"""

import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

NAMES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")


class Failing:
    """Counts collectives, and fails at one of them."""

    def __init__(self) -> None:
        mine = os.environ.get("RANK") == os.environ.get("CAMPAIGN_RANK")
        self.at = int(os.environ.get("CAMPAIGN_COLLECTIVE", "-1")) if mine else -1
        self.how = os.environ.get("CAMPAIGN_HOW", "raise")
        self.places: list[str] = []
        self._within = False

    def watched(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The same operation, counted; those that it is made of are not counted."""

        def act(*arguments: Any, **options: Any) -> Any:
            if self._within:
                return operation(*arguments, **options)
            if len(self.places) == self.at:
                self.fail()
            self.places.append(_place())
            self._within = True
            try:
                return operation(*arguments, **options)
            finally:
                self._within = False

        return act

    def fail(self) -> None:
        """Fail in the chosen way."""
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            os._exit(9)
        raise RuntimeError("a failure made by the campaign")


def _place() -> str:
    """The function of its2clr that calls, outside of the engine where it can be had."""
    ours = [frame for frame in inspect.stack(0) if "/its2clr/" in frame.filename]
    shown = [frame for frame in ours if "/engine/" not in frame.filename] or ours
    return f"{Path(shown[0].filename).name}:{shown[0].lineno}" if shown else "other"


def main(words: list[str]) -> None:
    """Run the command line; end the process if it fails."""
    failing = Failing()
    sys.argv[1:] = words
    code = 0
    for name in NAMES:
        setattr(dist, name, failing.watched(getattr(dist, name)))
    from its2clr.cli import main as its2clr

    try:
        its2clr()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - this is what the campaign looks for
        traceback.print_exc()
        code = 1
    finally:
        counted = os.environ.get("CAMPAIGN_COUNTED")
        if counted and os.environ.get("RANK") == "0":
            Path(counted).write_text(json.dumps(failing.places), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # else the agent waits for what this returns
        os._exit(code)
