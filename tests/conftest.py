"""What every test shares: one thread per process (tests run side by side), small settings, a small cohort."""

import os
import signal
import socket

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes what it runs in the background deaf to Ctrl-C

TINY = [
    "encoder.options={channels: [8, 8, 16, 16], stem_width: 8}",
    "projector={hidden_dim: 16, output_dim: 32, norm: batch}",
    "pretrain.epochs=2",
    "pretrain.batch_size=64",
    "pretrain.learning_rate=0.01",
    "aggregator.epochs=4",
    "refine.epochs=4",
    "refine.warmup_epochs=1",
    "refine.refresh_every=2",
    "refine.batch_size=64",
    "refine.learning_rate=0.003",
    "evaluation={retrainings: 2, bootstrap: 50}",
]
"""Overrides of the demo recipe that make a whole run a matter of seconds.

With these learning rates, embeddings stay spread out; with the demo's, so short a training is stuck near one point.
"""


def pytest_itemcollected(item: pytest.Item) -> None:
    """What `make mutation` asks of a test (mutmut 3.8) was renamed in pytest 9."""
    if "MUTANT_UNDER_TEST" in os.environ:
        item._nodeid = item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of an `xdist_group` together: xdist 3.8 adds the group to a name that pytest 9 no longer reads."""
    for item in items:
        with_group = vars(item).get("_nodeid", item.nodeid)
        if with_group != item.nodeid:
            item._id = type(item._id).parse(with_group)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this machine may be reached."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        local = not isinstance(address, tuple) or address[0] in {"127.0.0.1", "::1", "localhost"}
        assert local, f"a test tried to reach {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def tiny_cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest embedded cohort, drawn once per process."""
    from its2clr.cohort.synthetic.synthetic_cohort import make_synthetic

    folder = tmp_path_factory.mktemp("cohort") / "tiny"
    make_synthetic(folder, size="tiny", workers=1)
    return folder


@pytest.fixture(scope="session")
def evaluated_run(tiny_cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny run, evaluated; once per process, and not to be changed."""
    from its2clr.run.evaluation import evaluate
    from its2clr.run.opening import open_run

    run = tmp_path_factory.mktemp("run") / "run"
    stages = open_run(run, tiny_cohort, "demo", TINY, quiet=True)
    stages.fit()
    evaluate(stages)
    return run
