import csv
import errno
import subprocess
import sys

import pytest
import typer
from PIL import Image
from tests.end_to_end.commands import environment, its2clr

from its2clr import __version__
from its2clr.cli import program
from its2clr.errors import InputError
from its2clr.memory_limit import said_out_of_memory


def test_version_and_help_teach():
    assert its2clr("--version").stdout.strip() == __version__
    commands = its2clr("--help").stdout
    for name in ("demo", "cohort", "doctor", "pretrain", "extract", "aggregate", "refine", "evaluate", "fit"):
        assert name in commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "nowhere", "--out", "RUN"], "does not exist"),
        (["fit", "--out", "RUN"], "naming a cohort"),
        (["fit", "COHORT", "--out", "RUN", "--recipe", "demmo"], "did you mean 'demo'"),
        (["fit", "COHORT", "--out", "RUN", "--set", "refine.epoch=3"], "did you mean 'epochs'"),
        (["evaluate", "RUN"], "no run has begun here"),
        (["aggregate", "COHORT", "--out", "RUN", "--encoder", "vit"], "no encoder named 'vit'"),
        (["aggregate", "COHORT", "--out", "RUN"], "run `its2clr refine` on this run first"),
        (["cohort", "synthetic", "RUN", "--size", "tiny", "--set", "evidnce=1"], "did you mean 'evidence'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, message, tiny_cohort, tmp_path):
    places = {"RUN": tmp_path / "run", "COHORT": tiny_cohort}
    result = its2clr(*(places.get(argument, argument) for argument in arguments), check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback():
    result = its2clr("--debug", "fit", "nowhere", check=False)
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("debug", [False, True])
def test_an_unforeseen_error_is_one_line_and_exit_code_70(debug, monkeypatch, capsys):
    """Also of a process that is not the first, which may be the only one to meet it."""

    def broken():
        raise KeyError("of two\nlines " + 1000 * "x")

    monkeypatch.setattr("its2clr.settings.recipe_names", broken)
    monkeypatch.setattr("sys.argv", ["its2clr", *(["--debug"] if debug else []), "recipes"])
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        program.main()
    said = capsys.readouterr().err
    assert end.value.code == program.UNFORESEEN == 70
    assert ("Traceback" in said) == debug
    last = said.splitlines()[-1]
    assert last.startswith("error: its2clr recipes met an error that nobody foresaw: KeyError: ")
    assert "please report it" in last
    assert len(last) < 700
    if not debug:
        assert said.count("\n") == 1


def test_foreseen_errors_end_as_before(monkeypatch, capsys):
    for error, code, said in (
        (InputError("mend it"), 2, "error: mend it\n"),
        (OSError("no such file"), 2, "error: no such file\n"),
        (MemoryError(), 2, f"error: {said_out_of_memory(MemoryError())}\n"),
        (BrokenPipeError(errno.EPIPE, "closed"), 1, ""),
    ):
        monkeypatch.setattr(program, "app", typer.Typer(pretty_exceptions_enable=False))

        @program.app.command()
        def broken(error=error):
            raise error

        monkeypatch.setattr("sys.argv", ["its2clr"])
        with pytest.raises(SystemExit) as end:
            program.main()
        assert (end.value.code, capsys.readouterr().err) == (code, said)


def write_manifest(folder, *, label="1"):
    """Six bags of two images each, two per split; `label` is that of the first bag."""
    rows = []
    for number in range(6):
        images = folder / f"bag{number}"
        images.mkdir()
        for image in range(2):
            Image.new("RGB", (40, 40), (number * 40, image * 90, 120)).save(images / f"{image}.png")
        split = ("train", "val", "test")[number // 2]
        rows.append([f"b{number}", images.name, label if number == 0 else str((number + 1) % 2), split])
    path = folder / "manifest.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["bag_id", "path", "label", "split"], *rows])
    return path


def test_images_become_a_cohort_that_the_doctor_likes(tmp_path):
    manifest = write_manifest(tmp_path)
    (tmp_path / "bag0" / "broken.png").write_bytes(b"not an image")
    options = ["--tile-size", "32", "--encoding", "png"]
    result = its2clr("cohort", "images", manifest, tmp_path / "cohort", *options, fresh=True)
    assert "6 bags, 12 images" in result.stdout
    assert "1 images" in result.stdout
    assert "broken.png" in (tmp_path / "cohort" / "problems.csv").read_text()
    checked = its2clr("doctor", tmp_path / "cohort", fresh=True)
    assert "0 errors" in checked.stdout
    (tmp_path / "cohort" / "tiles" / "b3.h5").write_bytes(b"damaged")
    result = its2clr("doctor", tmp_path / "cohort", check=False)
    assert result.returncode == 1
    assert "b3.h5" in result.stdout


def test_a_bad_manifest_names_file_and_row(tmp_path):
    manifest = write_manifest(tmp_path, label="yes")
    result = its2clr("cohort", "images", manifest, tmp_path / "cohort", check=False)
    assert result.returncode == 2
    assert "manifest.csv" in result.stderr
    assert "row 2" in result.stderr
    assert its2clr("doctor", manifest, check=False).returncode == 1


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--help"], ["reproduce", "--list"], ["recipes", "demo"]])
def test_what_only_prints_starts_without_torch(words):
    """Importing torch takes seconds."""
    program = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = {words}; import its2clr.__main__ as m; m.main()"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
