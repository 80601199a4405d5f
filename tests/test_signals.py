"""Ctrl-C and SIGTERM: one way out, in time, with all workers."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from its2clr.signals import interrupts_wait


def test_a_block_that_interrupts_wait_for_ends_first():
    done = []

    def work():
        with interrupts_wait(), interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            done.append(True)
        done.append("not reached")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGTERM) is before


COMMAND = """
import os, signal, sys, threading, typer
from its2clr import signals
from its2clr.cli import program
signals.SECONDS_TO_END = float(sys.argv[1])
sys.argv[1:] = []
app = typer.Typer()

@app.command()
def work():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)
    finally:
        print("tidied up", flush=True)
        if program.stuck:
            threading.Event().wait(60)

program.app, program.stuck = app, STUCK
program.main()
"""


@pytest.mark.parametrize(("stuck", "seconds"), [(False, 60), (True, 0.1)])
def test_sigterm_ends_a_command_like_ctrl_c_and_in_time(stuck, seconds):
    code = COMMAND.replace("STUCK", str(stuck))
    ended = subprocess.run(
        [sys.executable, "-c", code, str(seconds)], capture_output=True, text=True, check=False, timeout=50
    )
    assert ended.returncode == 143
    assert ended.stdout == "tidied up\n"
    assert ended.stderr == "stopped by SIGTERM; the same command goes on where it stopped\n"


def test_workers_that_draw_slides_end_with_a_killed_command(tmp_path):
    code = (
        "import sys; from its2clr.cohort.synthetic.synthetic_cohort import make_synthetic\n"
        "if __name__ == '__main__': make_synthetic(sys.argv[1], size='large', workers=2, "
        "progress=lambda *_: print('one', flush=True))\n"
    )
    script = tmp_path / "draw.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path / "out")], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"one\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        for worker in workers:  # Slurm sends it to every process; workers leave it to the command
            os.kill(worker.pid, signal.SIGTERM)
        assert process.stdout.readline() == b"one\n"
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
