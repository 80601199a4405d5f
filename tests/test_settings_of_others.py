"""Recipes, runs and studies of others: their plugins are not run, and they do not say where to write."""

import sys
from importlib import resources
from pathlib import Path

import pytest
import yaml

from its2clr import ItS2CLR, cli, plugins
from its2clr.errors import InputError
from its2clr.experiments.reproduce import reproduce
from its2clr.predict.inference import open_for_prediction
from its2clr.predict.model_of_run import model_of_run
from its2clr.run.features import open_run_features
from its2clr.run.opening import open_corrected, open_run
from its2clr.tune.study import Study
from tests.viewer.viewer_runs import write_cohort, write_run


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch):
    monkeypatch.setattr(plugins, "_allowed", set())


@pytest.fixture
def trace(tmp_path):
    """What the plugin leaves behind when it is run."""
    return tmp_path / "was here"


@pytest.fixture
def plugin(tmp_path, trace):
    path = tmp_path / f"theirs_{trace.parent.name}.py"  # a plugin of this name is imported once per process
    path.write_text(f"open({str(trace)!r}, 'a').write('run ')\n")
    return path


@pytest.fixture
def run(tmp_path, plugin):
    """An evaluated run of someone else, which names a plugin."""
    folder = write_run(tmp_path / "run", write_cohort(tmp_path / "cohort", [f"b{number}" for number in range(6)]))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "plugins": [str(plugin)]}))
    return folder


@pytest.fixture
def recipe(tmp_path, plugin):
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump({"plugins": [str(plugin)]}))
    return path


def refused(work, plugin, trace):
    with pytest.raises(InputError, match=rf"{plugin.name}.*not run.*its2clr --allow-plugins COMMAND"):
        work()
    assert not trace.exists()


@pytest.mark.parametrize(
    "opened",
    [
        open_run,
        open_run_features,
        model_of_run,
        open_for_prediction,
        lambda run: open_corrected(run, run, run.parent / "corrected"),
        lambda run: ItS2CLR(run=run).evaluate(),
    ],
)
def test_the_plugins_of_a_run_are_not_run(run, plugin, trace, opened):
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "encoder-refined.safetensors").touch()  # which corrections would start from
    refused(lambda: opened(run), plugin, trace)


def test_the_plugins_of_a_recipe_study_or_experiment_are_not_run(recipe, plugin, trace, tmp_path):
    cohort = write_cohort(tmp_path / "cohort", [f"b{number}" for number in range(6)])
    refused(lambda: open_run(tmp_path / "new", cohort, recipe), plugin, trace)
    refused(lambda: ItS2CLR(recipe, run=tmp_path / "new", verbose=False).fit(cohort), plugin, trace)
    refused(lambda: Study.begin(tmp_path / "study", cohort, str(recipe)), plugin, trace)
    Study.begin(tmp_path / "study", cohort)
    saved = yaml.safe_load((tmp_path / "study" / "study.yaml").read_text())
    saved["settings"]["plugins"] = [str(plugin)]
    (tmp_path / "study" / "study.yaml").write_text(yaml.safe_dump(saved))
    refused(lambda: Study(tmp_path / "study"), plugin, trace)
    names, out = ["tab:mainresult"], tmp_path / "out"
    refused(lambda: reproduce(names, {"": cohort}, out, budget="smoke", recipe=str(recipe)), plugin, trace)
    table = write_table(tmp_path, {"plugins": [str(plugin)]})
    refused(lambda: reproduce([table], {"": cohort}, out, budget="smoke"), plugin, trace)


def test_what_the_user_names_is_run(recipe, plugin, trace, tmp_path, monkeypatch):
    cohort = write_cohort(tmp_path / "cohort", [f"b{number}" for number in range(6)])
    words = [
        "its2clr",
        "pretrain",
        str(cohort),
        "--out",
        str(tmp_path / "new"),
        "--set",
        "encoder.name=no_such_network",
    ]

    def started(*changes):
        monkeypatch.setattr(plugins, "_allowed", set())
        sys.modules.pop(f"its2clr_plugin_{plugin.stem}", None)
        monkeypatch.setattr(sys, "argv", [changes[0], *changes[1:]])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2  # for want of such a network, if nothing else
        return trace.read_text().split() if trace.exists() else []

    assert started(*words, "--recipe", str(recipe)) == []
    assert started(words[0], "--allow-plugins", *words[1:], "--recipe", str(recipe)) == ["run"]
    assert started(*words, "--set", f"plugins=[{plugin}]") == ["run", "run"]


def test_what_the_caller_names_in_python_is_run(plugin, trace, tmp_path):
    model = ItS2CLR(run=tmp_path / "new", overrides={"plugins": [str(plugin)], "encoder.name": "no_such_network"})
    with pytest.raises(InputError, match="no model 'no_such_network'"):
        model.fit(write_cohort(tmp_path / "cohort", [f"b{number}" for number in range(6)]))
    assert trace.exists()


def test_a_module_of_the_library_is_no_exception(tmp_path):
    with pytest.raises(InputError, match=r"name Python code: antigravity\."):
        plugins.import_plugins(["antigravity"])
    plugins.allow_plugins([str(Path("mine.py"))])
    plugins.check_allowed([str(Path("mine.py").absolute())])
    with pytest.raises(InputError, match=r"other.py\."):
        plugins.check_allowed([str(Path("mine.py").absolute()), "/home/other.py"])


def test_a_file_does_not_say_where_tiles_are_written(tmp_path):
    elsewhere = str(tmp_path / "elsewhere")
    cohort = write_cohort(tmp_path / "cohort", [f"b{number}" for number in range(6)])
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text(yaml.safe_dump({"engine": {"tile_folder": elsewhere}}))
    with pytest.raises(InputError, match=r"theirs.yaml: engine.tile_folder .* give it after --set"):
        open_run(tmp_path / "run", cohort, recipe)
    recipe.write_text(yaml.safe_dump({"engine": {"tile_folder": None}}))  # as `its2clr recipes NAME` prints it
    given = [f"engine.tile_folder={elsewhere}"]
    assert open_run(tmp_path / "run", cohort, recipe, given, quiet=True).engine.tile_folder == elsewhere
    assert elsewhere not in (tmp_path / "run" / "config.yaml").read_text()

    put_into(tmp_path / "run" / "config.yaml", elsewhere)
    assert open_run(tmp_path / "run", quiet=True).engine.tile_folder is None
    assert open_run_features(tmp_path / "run", quiet=True).engine.tile_folder is None
    assert open_run(tmp_path / "run", overrides=given, quiet=True).engine.tile_folder == elsewhere


def test_a_study_or_table_does_not_say_where_tiles_are_written(tmp_path):
    elsewhere = str(tmp_path / "elsewhere")
    cohort = write_cohort(tmp_path / "cohort", [f"b{number}" for number in range(6)])
    begun = Study.begin(tmp_path / "study", cohort, overrides=[f"engine.tile_folder={elsewhere}"])
    assert begun.config.engine.tile_folder == elsewhere
    assert elsewhere not in (tmp_path / "study" / "study.yaml").read_text()
    put_into(tmp_path / "study" / "study.yaml", elsewhere)
    assert Study(tmp_path / "study").config.engine.tile_folder is None
    assert Study.begin(tmp_path / "study").config.engine.tile_folder is None

    table = write_table(tmp_path, {"engine.tile_folder": elsewhere})
    with pytest.raises(InputError, match=r"engine\.tile_folder is given after --set"):
        reproduce([table], {"": cohort}, tmp_path / "out", budget="smoke")


def write_table(folder, values):
    """A file of `its2clr reproduce` whose cells have these settings."""
    table = yaml.safe_load(resources.files("its2clr.experiments.specs").joinpath("tab-ultrasound.yaml").read_text())
    (folder / "table.yaml").write_text(yaml.safe_dump({**table, "cell": {"values": values}}))
    return str(folder / "table.yaml")


def put_into(file, folder):
    document = yaml.safe_load(file.read_text())
    document.get("settings", document)["engine"]["tile_folder"] = folder
    file.write_text(yaml.safe_dump(document))
