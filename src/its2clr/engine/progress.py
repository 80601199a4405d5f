"""Progress with rates and time left: bars on a terminal, one updated output in a notebook, plain lines otherwise."""

import time
import uuid
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Self

from rich import progress as rich_progress
from rich.console import Console

LINE_EVERY_SECONDS = 10.0
ESTIMATED_AFTER_SECONDS = 5.0
NOTEBOOK_EVERY_SECONDS = 0.2
_BAR_WIDTH = 24


class Progress:
    """One running job: call `advance` as it goes on, and `note` to show a text beside the bar."""

    def __init__(self, owner: "ProgressBar", name: str, total: int, unit: str) -> None:
        self._owner, self._name, self._total, self._unit = owner, name, total, unit
        self._done, self._note = 0, ""
        self._started = self._last_line = time.monotonic()
        self._bar: rich_progress.Progress | None = None
        self._task: rich_progress.TaskID | None = None

    def __enter__(self) -> Self:
        if self._owner.enabled and self._owner.console.is_terminal:
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description:<12}"),
                rich_progress.BarColumn(bar_width=_BAR_WIDTH),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TextColumn("{task.fields[rate]}"),
                rich_progress.TimeRemainingColumn(),
                rich_progress.TextColumn("{task.fields[note]}"),
                console=self._owner.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=self._total, rate="", note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._owner.notebook is not None:
            self._owner.notebook.show_running("")

    def note(self, text: str) -> None:
        """Show a short text beside the bar."""
        self._note = text

    def reach(self, done: int, total: int) -> None:
        """Set how many units are finished, and how many there are."""
        if total != self._total:
            self._total = total
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, total=total)
        self.advance(done - self._done)

    def reach_with(self, unit: str) -> Callable[[int, int, int], None]:
        """A callback like `reach` that also takes a second count; its rate is shown beside the bar."""

        def reach(done: int, total: int, others: int) -> None:
            self.note(f"{others / max(time.monotonic() - self._started, 1e-9):.3g} {unit}/s")
            self.reach(done, total)

        return reach

    def advance(self, amount: int = 1) -> None:
        """Add finished units."""
        self._done += amount
        if not self._owner.enabled:
            return
        now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        rate = f"{self._done / seconds:.3g} {self._unit}/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, rate=rate, note=self._note)
        elif self._owner.notebook is not None:
            if now - self._last_line >= NOTEBOOK_EVERY_SECONDS:
                self._last_line = now
                filled = _BAR_WIDTH * self._done // max(1, self._total)
                self._owner.notebook.show_running(f"[{'#' * filled:.<{_BAR_WIDTH}}] {self._line(seconds, rate)}")
        elif now - self._last_line >= LINE_EVERY_SECONDS and 0 < self._done < self._total:
            self._last_line = now
            self._owner.print(self._line(seconds, rate))

    def _line(self, seconds: float, rate: str) -> str:
        left = _duration(seconds / max(1, self._done) * max(0, self._total - self._done))
        note = f", {self._note}" if self._note else ""
        return f"{self._name}: {self._done}/{self._total}, {rate}, {left} left{note}"


class NotebookOutput:
    """The one output of a notebook's cell: the lines said so far, and below them the job that is running."""

    def __init__(self) -> None:
        self._ipython = import_module("IPython")
        self._cell, self._place, self._running = 0, "", ""
        self._lines: list[str] = []

    def say(self, line: str) -> None:
        """Add a line that stays."""
        self._update([line], self._running)

    def show_running(self, text: str) -> None:
        """Replace the line of the job that is running; nothing when it has ended."""
        self._update([], text)

    def _update(self, new: list[str], running: str) -> None:
        cell = self._ipython.get_ipython().execution_count
        is_new = not self._place or cell != self._cell
        if is_new:  # a model made in one cell works on in the next, below which its output belongs
            self._cell, self._place, self._lines = cell, uuid.uuid4().hex, []
        self._lines, self._running = [*self._lines, *new], running
        text = "\n".join([*self._lines, *([running] if running else [])])
        if is_new and not text:
            self._place = ""
            return
        self._ipython.display.display({"text/plain": text}, raw=True, display_id=self._place, update=not is_new)


class ProgressBar:
    """Makes progress displays for one process."""

    def __init__(self, *, enabled: bool = True, console: Console | None = None) -> None:
        self.enabled = enabled
        self.console = console or Console(highlight=False)
        self.notebook = NotebookOutput() if self.console.is_jupyter else None

    def start(self, name: str, total: int, unit: str) -> Progress:
        """A new job of `total` units."""
        return Progress(self, name, total, unit)

    def print(self, message: str) -> None:
        """One line of plain text."""
        if self.enabled and self.notebook is not None:
            self.notebook.say(message)
        elif self.enabled:
            self.console.print(message, markup=False, soft_wrap=True)


class TotalWork:
    """The work of several stages together, and how long the rest takes at the rate that was measured.

    Args:
        total: Units of all stages.
        estimated: Called once, when the rate has been measured, with the seconds left and the units per second.
    """

    def __init__(self, total: int, estimated: Callable[[float, float], None] | None = None) -> None:
        self.total, self.done = total, 0
        self._estimated = estimated
        self._measured, self._seconds, self._since, self._new = 0, 0.0, 0.0, 0

    def begin(self) -> None:
        """Measure from here on; what was done before and is not measured yet does not count."""
        self._since, self._new = time.monotonic(), 0

    def add(self, amount: int) -> None:
        """Count finished units."""
        self.done += amount
        self._new += amount

    def measure(self, *, enough: float = ESTIMATED_AFTER_SECONDS) -> None:
        """Count the time since `begin`, in which everything added since was finished.

        Args:
            enough: Seconds that must have been measured before the first estimate is made.
        """
        now = time.monotonic()
        self._seconds, self._measured = self._seconds + now - self._since, self._measured + self._new
        self.begin()
        if self._estimated is not None and self._measured and self._seconds >= enough:
            estimated, self._estimated = self._estimated, None
            estimated(self.seconds_left, self._measured / self._seconds)
            self.begin()

    @property
    def is_measured(self) -> bool:
        """Whether a rate is known."""
        return self._measured > 0

    @property
    def seconds_left(self) -> float:
        """How long the rest takes at the measured rate."""
        return max(0, self.total - self.done) * self._seconds / self._measured

    def said(self) -> str:
        """How far all stages are together."""
        share = f"{min(1.0, self.done / max(1, self.total)):.0%} of all encoder training"
        return f"{share}, {_duration(self.seconds_left)} left" if self.is_measured else share


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
