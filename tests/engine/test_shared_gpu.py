"""The service that lets workers share a GPU: a program of the same name takes its place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from its2clr.engine import shared_gpu as module
from its2clr.engine.shared_gpu import PIPES, PROGRAM, shared_gpu


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A program that notes what it is told; returns its notes."""
    notes = tmp_path / "notes"
    program = tmp_path / "bin" / PROGRAM
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$1 $(cat) ${{{PIPES}:+own}} ${{CUDA_VISIBLE_DEVICES:-all}}" >> {notes}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(module, "USUAL_PIPES", tmp_path / "none")
    return notes


def pipes_of_a_process():
    told = [sys.executable, "-c", f"import os; print(os.environ.get({PIPES!r}, ''))"]
    return subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()


def test_processes_of_the_block_use_a_service_that_ends_with_it(service, monkeypatch):
    monkeypatch.setattr(module, "PROBE", "")
    used = []

    def fail():
        with shared_gpu():
            used.append(Path(pipes_of_a_process()))
            assert used[0].is_dir()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert service.read_text().splitlines() == ["-d  own all", " quit own all"]
    assert PIPES not in os.environ
    assert not used[0].exists()


def test_a_service_that_gives_no_gpu_is_not_used(service, monkeypatch):
    monkeypatch.setattr(module, "PROBE", "raise SystemExit(1)")
    with shared_gpu():
        assert pipes_of_a_process() == ""
    assert service.read_text().splitlines()[-1] == " quit own all"


def test_a_service_that_runs_already_is_left_alone(service, tmp_path, monkeypatch):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "control").touch()
    with shared_gpu():
        assert pipes_of_a_process() == ""
    monkeypatch.setattr(module, "USUAL_PIPES", tmp_path / "other")
    monkeypatch.setenv(PIPES, "mine")
    with shared_gpu():
        assert pipes_of_a_process() == "mine"
    assert os.environ[PIPES] == "mine"
    assert not service.exists()
