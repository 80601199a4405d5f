"""A short campaign, and whether the campaign would notice: a harness that sees nothing finds nothing."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.campaign import machine
from tests.campaign.content import content, differences, half_written
from tests.campaign.machine import MOST_MEMORY, Ended, fork
from tests.campaign.ranks import _check
from tests.campaign.tally import Clock, Part
from tests.end_to_end.commands import ROOT, environment
from tests.test_files import killed_while_writing

LEAST = {"kills": 2, "inputs": 200, "full disk": 1, "stale": 2, "viewer": 150}
"""Tries of each part."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and reads /proc")


@pytest.fixture(scope="module")
def short_campaign(tmp_path_factory):
    path = tmp_path_factory.mktemp("campaign") / "campaign.json"
    words = [sys.executable, "-m", "tests.campaign", "--short", "--seed", "5", "--json", str(path)]
    said = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=400)
    return said, json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.xdist_group("campaign")
@pytest.mark.parametrize("name", LEAST)
def test_a_short_campaign_finds_nothing(short_campaign, name):
    said, found = short_campaign
    part = found["parts"][name]
    assert part["failed"] == [], said.stdout
    assert part["tries"] >= LEAST[name]


@pytest.mark.slow
@pytest.mark.xdist_group("campaign")
def test_bombs_take_little_memory(short_campaign):
    """Peak memory of the process that reads them, with all libraries, which take 0.6 GB."""
    bombs = short_campaign[1]["parts"]["inputs"]["bombs"]
    assert len(bombs) == 7
    assert {name for name, one in bombs.items() if not one["refused"]} == {"PNG of 8,000 x 8,000 pixels"}
    assert max(one["peak_bytes"] for one in bombs.values()) < 1.5e9
    assert short_campaign[0].returncode == 0


@pytest.mark.parametrize(
    ("ended", "complaint"),
    [
        (Ended(0, "done", 1.0, 10**9), None),
        (Ended(2, "error: no such file", 1.0, 10**9), None),
        (Ended(2, "Traceback (most recent call last):", 1.0, 10**9), "traceback"),
        (Ended(70, "error: nobody foresaw", 1.0, 10**9), "exit code 70"),
        (Ended(-11, "", 1.0, 10**9), "exit code -11"),
        (Ended(-9, "", 99.0, 10**9, hung=True), "hung"),
        (Ended(0, "done", 1.0, MOST_MEMORY + 1), "took 4.0 GB"),
    ],
)
def test_every_bad_end_is_a_failure(ended, complaint, capsys):
    part = Part("kills")
    assert part.ended("a try", ended) is (complaint is None)
    assert [one["seen"].startswith(complaint) for one in part.failures] == ([True] if complaint else [])
    assert part.summary()["failures"] == len(part.failures)


def test_a_changed_result_is_seen_and_a_changed_time_is_not(tmp_path):
    for name, weight, label, seconds in (("a", 1.0, 1, 3), ("b", 1.0, 1, 4), ("c", 1.5, 0, 3)):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"w": np.full(3, weight, np.float32)}, folder / "encoder.safetensors")
        (folder / "results.json").write_text(json.dumps({"auc": weight, "seconds": seconds, "at": str(folder)}))
        (folder / "bags.csv").write_text(f"bag_id,label\nx,{label}\n")
    found = {name: content(tmp_path / name) for name in "abc"}
    assert differences(found["a"], found["b"]) == []
    assert differences(found["a"], found["c"]) == ["bags.csv", "encoder.safetensors", "results.json"]
    (tmp_path / "b" / "more.txt").write_text("not in the other")
    assert differences(found["a"], content(tmp_path / "b")) == ["more.txt"]
    assert not half_written(tmp_path)
    killed_while_writing(tmp_path / "a" / "b.json")
    assert len(half_written(tmp_path)) == 1


def test_a_process_that_waits_and_one_that_computes_for_ever_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "HANG_SECONDS", 2)
    monkeypatch.setattr(machine, "PROGRESS", 0.01)  # others may use the processors
    monkeypatch.setattr(machine.atexit, "_run_exitfuncs", lambda: None)  # those of earlier tests may wait

    def compute(seconds):
        begun = time.process_time()  # of the forked process: its clock starts at zero
        while time.process_time() - begun < seconds:
            sum(range(1000))
        return 0

    assert fork(lambda: time.sleep(60) or 0, tmp_path, limit=60).hung
    assert fork(lambda: compute(60), tmp_path, limit=1).hung
    assert not fork(lambda: compute(2.5), tmp_path, limit=60).hung  # longer than a wait may be, but at work


def test_a_traceback_of_the_agent_is_not_ours():
    agent = "E1118 12:42:34.886000 17159 /x/torch/distributed/elastic/multiprocessing/api.py:836] "
    trace = "Traceback (most recent call last):"
    for output, failures in ((agent + trace, 0), (trace, 1), (agent + "x\n" + trace, 1)):
        part = Part("ranks")
        _check("a try", 1, output, "kill", part)
        assert len(part.failures) == failures


def test_a_part_below_its_goal_goes_on_for_half_as_long_again(monkeypatch):
    part, now = Part("kills"), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = Clock(10, part, goal=2)
    now = 11.0
    assert not clock.over()
    part.tried("fit", 2)
    assert clock.over()
    part.tries.clear()
    now = 16.0
    assert clock.over()
