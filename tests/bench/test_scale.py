"""The measurement over bags and slides, at a tiny size: every command still runs as it is called there."""

import json
from pathlib import Path

from tests.end_to_end.commands import its2clr

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_everything_is_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import scale

    measured = scale.Measured

    class Quick(measured):
        """The viewer is a process of its own; other commands come from one that has imported torch."""

        def __init__(self, words, log):
            self.quick = words[3] != "view"
            if self.quick:
                its2clr(*words[3:])
            else:
                super().__init__(words, log)

        def end(self, expected=0):
            none = dict.fromkeys(("seconds", "cpu_seconds", "peak_mb", "own_mb"), 0.0)
            return none if self.quick else super().end(expected)

    monkeypatch.setattr(scale, "Measured", Quick)
    # Tiling with a kill is tested in test_slides_killed.
    monkeypatch.setattr(scale, "after_kill", lambda words, out, log: {"content": scale.cohort_content(out)["content"]})
    monkeypatch.setattr(scale, "INSTANCES", 9)
    monkeypatch.setattr(scale, "FEATURES", 16)
    monkeypatch.setitem(scale.FIT, "refine.steps_per_epoch", 2)
    out, picture = tmp_path / "scale.json", tmp_path / "scale.png"
    words = ["--bags", "20", "--slides", "12", "--side", "1600", "--folder", str(tmp_path), "--out", str(out)]
    scale.main([*words, "--picture", str(picture)])
    found = json.loads(out.read_text())
    of_bags, of_slides = found["bags"]["20"], found["slides"]["12"]
    assert set(of_bags) == {
        "cohort", "doctor", "fit", "epochs", "evaluate", "predict", "report", "map", "geojson", "viewer"
    }  # fmt: skip
    assert set(of_bags["epochs"]) == {"refine", "round"}
    assert of_bags["viewer"]["peak_mb"] > of_bags["viewer"]["own_mb"] > 20
    assert 0 < of_bags["viewer"]["cpu_seconds"] < 60
    assert 0 < of_bags["viewer"]["first_page_seconds"] < 5
    assert of_slides["tiles"] >= 12
    assert len(of_slides["after_kill"]["content"]) == 12
    assert picture.stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] in (["scale.json", "scale.png"], ["scale.png", "scale.json"])
