import os
import subprocess
import sys
from pathlib import Path

SERVED = "def serve(pipe):\n    while True:\n        pipe.send(2 * pipe.recv())\n"
SCRIPT = """
from served import serve
from its2clr.processes import Worker

print("the script runs")
worker = Worker(serve)
worker.give(21)
print(worker.take())
worker.stop()
"""


def test_a_script_is_not_run_again_by_its_workers(tmp_path):
    (tmp_path / "served.py").write_text(SERVED)
    (tmp_path / "script.py").write_text(SCRIPT)
    source = Path(__file__).parents[1] / "src"
    found = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert found.stdout == "the script runs\n42\n", found.stderr
