import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from its2clr.engine import progress
from its2clr.engine.progress import ProgressBar


class _Notebook:
    """What IPython shows: one text for each output."""

    def __init__(self):
        self.shown, self.calls, self.execution_count = {}, [], 1
        self.display = SimpleNamespace(display=self._display)

    def get_ipython(self):
        return self

    def _display(self, data, *, raw, display_id, update):
        assert raw
        assert update == (display_id in self.shown)
        self.shown[display_id] = data["text/plain"]
        self.calls.append(data["text/plain"])


@pytest.fixture
def notebook(monkeypatch):
    found = _Notebook()
    monkeypatch.setitem(sys.modules, "IPython", found)
    monkeypatch.setattr(progress, "NOTEBOOK_EVERY_SECONDS", 0)
    return found


def test_a_cell_of_a_notebook_has_one_output_that_is_updated(notebook):
    bars = ProgressBar(console=Console(force_jupyter=True))
    bars.print("first [line]")
    with bars.start("refine", 4, "tiles") as job:
        job.note("loss 1.0")
        job.advance(2)
        bars.print("second")
    assert list(notebook.shown.values()) == ["first [line]\nsecond"]
    running = notebook.calls[1].splitlines()
    assert running[0] == "first [line]"
    assert running[1].startswith("[############............] refine: 2/4, ")
    assert running[1].endswith(" left, loss 1.0")
    assert notebook.calls[2].splitlines() == ["first [line]", "second", running[1]]
    notebook.execution_count = 2
    with bars.start("predict", 4, "tiles"):
        pass
    assert len(notebook.shown) == 1  # nothing was said
    bars.print("third")
    assert list(notebook.shown.values()) == ["first [line]\nsecond", "third"]


def test_a_silent_model_shows_nothing_in_a_notebook(notebook):
    bars = ProgressBar(enabled=False, console=Console(force_jupyter=True))
    bars.print("nothing")
    with bars.start("refine", 4, "tiles") as job:
        job.advance(2)
    assert not notebook.calls
