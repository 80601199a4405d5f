import json
import subprocess
import sys
from pathlib import Path

import its2clr.evaluation

LOADED = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(f"its2clr.evaluation.{name}")
print(json.dumps(sorted(sys.modules)))
"""


def test_metrics_know_nothing_of_runs_and_load_nothing_heavy():
    """Of this package only errors, wording and version; scikit-learn and scipy not before a metric needs them."""
    modules = [path.stem for path in Path(its2clr.evaluation.__path__[0]).glob("[a-z]*.py")]
    assert len(modules) >= 8
    said = subprocess.run([sys.executable, "-c", LOADED, *modules], capture_output=True, text=True, check=True)
    loaded = json.loads(said.stdout)
    ours = {name for name in loaded if name.startswith("its2clr.") and not name.startswith("its2clr.evaluation")}
    assert ours <= {"its2clr.errors", "its2clr.wording", "its2clr.version"}
    assert not {name.split(".")[0] for name in loaded} & {"sklearn", "scipy", "torch", "pandas"}
