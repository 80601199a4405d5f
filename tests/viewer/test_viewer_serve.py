import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import numpy as np
import pandas as pd
import pytest
from starlette.testclient import TestClient
from tests.end_to_end.commands import command, environment
from tests.viewer.viewer_runs import write_cohort, write_run

from its2clr import cli
from its2clr.errors import InputError
from its2clr.viewer import serve as serving


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    return write_run(folder / "run", write_cohort(folder / "cohort", [f"b{number}" for number in range(6)]))


def refusal(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["its2clr", "view", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent as a signal")
def test_it_serves_until_interrupted(run):
    words = command("view", run, "--port", "0", "--no-open", "--token", "a b&c")
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        assert "6 bags, 3 models, 3 rounds" in lines[0]
        address = re.fullmatch(r"open (http://127\.0\.0\.1:\d+/)\?token=a%20b%26c\n", lines[1])[1]
        assert httpx.get(f"{address}api/run").status_code == 401
        with httpx.Client() as browser:
            page = browser.get(address, params={"token": "a b&c"})
            assert page.status_code == 200
            assert browser.get(f"{address}api/run").json()["n_bags"] == 6
            assert browser.get(f"{address}static/openseadragon/openseadragon.min.js").status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_a_busy_port_is_told(run, monkeypatch, capsys):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert f"port {port} is taken" in refusal(monkeypatch, capsys, run, "--port", port, "--no-open")


def test_what_cannot_be_shown_is_told(run, tmp_path, monkeypatch, capsys):
    assert "not a run" in refusal(monkeypatch, capsys, tmp_path)
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    assert "not evaluated yet" in refusal(monkeypatch, capsys, tmp_path)
    assert "must not be empty" in refusal(monkeypatch, capsys, run, "--token", " ")
    assert "not an address of this machine" in refusal(monkeypatch, capsys, run, "--host", "203.0.113.7")


def test_every_start_gets_a_token_of_its_own(run, monkeypatch):
    import uvicorn

    seen, said = [], []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: seen.append((self.config.app, sockets[0])))
    for host in ("127.0.0.1", "127.0.0.1", "0.0.0.0", "0.0.0.0"):
        serving.serve(run, host=host, port=0, open_browser=False, say=said.append)
    tokens = [re.search(r"\?token=([\w-]{32})(?: |$)", line)[1] for line in said if line.startswith("open")]
    assert len(set(tokens)) == 4
    assert [app._token for app, _ in seen] == tokens
    assert [app._local for app, _ in seen] == [True, True, False, False]


def test_a_browser_is_opened_where_there_is_a_screen(run, monkeypatch):
    import uvicorn

    opened = []
    monkeypatch.setattr(serving.webbrowser, "open", opened.append)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    serving.serve(run, port=0, token="k3y", open_browser=True, say=lambda _: None)
    assert len(opened) == 1
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?once=[\w-]{32}", opened[0])
    serving.serve(run, port=0, open_browser=None, say=lambda _: None)  # no terminal here
    assert len(opened) == 1


def test_new_slides_are_predicted_and_shown(evaluated_run, tmp_path, monkeypatch, capsys):
    """`view MODEL SLIDE` is `predict`, then `view` of what it wrote."""
    import tifffile
    import uvicorn

    noise = np.random.default_rng(0).integers(60, 220, (96, 160, 3), dtype=np.uint8)
    tifffile.imwrite(
        tmp_path / "case 7.tiff", noise, photometric="rgb", tile=(32, 32), resolution=(10000, 10000),
        resolutionunit="CENTIMETER",
    )  # fmt: skip
    shown = []
    monkeypatch.setattr(serving.Guard, "__init__", lambda self, app, **_: shown.append(app))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    monkeypatch.chdir(tmp_path)
    words = ["view", evaluated_run, tmp_path / "case 7.tiff", "--port", 0, "--no-open", "--token", "k"]
    monkeypatch.setattr(sys, "argv", ["its2clr", *map(str, words), "--set", "engine.accelerator=cpu"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "predictions/case 7: 1 bags, 1 models, 0 rounds" in said
    assert "its2clr view 'predictions/case 7'" in said
    client = TestClient(shown[0])
    [row] = client.get("/api/bags").json()["rows"]
    assert (row["bag_id"], row["label"], row["error"]) == ("case 7", None, False)
    expected = float(pd.read_csv(tmp_path / "predictions" / "case 7" / "predictions.csv")["probability"][0])
    assert row["probability"] == pytest.approx(expected)
    assert client.get("/api/bags/0").json()["is_slide"]
    assert "new bags" in client.get("/api/bags/0/marks").json()["note"]


def test_a_model_without_slides_is_told(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.its2clr").write_bytes(b"")
    assert "model.its2clr SLIDE...`" in refusal(monkeypatch, capsys, tmp_path / "model.its2clr")
    assert "give the slides, too" in refusal(monkeypatch, capsys, run, "--out", tmp_path)


def test_addresses_are_written_as_browsers_take_them():
    assert serving.address("::1", 80, once="k") == "http://[::1]:80/?once=k"
    assert serving.address("lab", 80, token="a/b c") == "http://lab:80/?token=a%2Fb%20c"
    assert serving.address("0.0.0.0", 80, token="k") == f"http://{socket.gethostname()}:80/?token=k"
    with pytest.raises(InputError, match="no such address"):
        serving.listen("no such host", 1)
