"""Options and settings that messages, help and docs name are there."""

import re
from pathlib import Path

import click
import typer

from its2clr.cli.program import app
from its2clr.config import RunConfig, Section

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("src/**/*.py"), *ROOT.glob("src/**/*.yaml"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
OTHER_PROGRAMS = re.compile(
    r"make_bags\.py|benchmarks/|aws |curl |gdc-client|torchrun|srun|sbatch|pip install|--row |-->|--grid"
    r"|tests\.campaign|dask |gres|--qos|--tls|--no-dashboard|--resources|--no_auto_skip|--skip_errors"
)
"""Lines with commands of others, the arrows of a drawing, and styles of the report."""

OF_SLURM = {
    "--array", "--cpus-per-task", "--gpus-per-node", "--gpus-per-task", "--job-name", "--kill-on-bad-exit", "--nodes",
    "--ntasks", "--ntasks-per-node", "--open-mode", "--output", "--requeue", "--signal", "--time",
}  # fmt: skip
"""Options of `sbatch` and `srun`, whose files stand in the guide."""


def options_of(command: click.Command) -> set[str]:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(options_of, getattr(command, "commands", {}).values()))


def settings_of(section: type[Section], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        found |= {f"{prefix}{name}"}.union(*(settings_of(kind, f"{prefix}{name}.") for kind in inner))
    return found


def test_options_and_settings_that_are_named_are_there():
    options = options_of(typer.main.get_command(app)) | {"--help"} | OF_SLURM
    settings = settings_of(RunConfig)
    setting = re.compile(rf"(?<![\w./])((?:{'|'.join(RunConfig.model_fields)})(?:\.[a-z_]+)+)=")
    wrong = []
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            named = set() if OTHER_PROGRAMS.search(line) else set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line))
            keys = {re.sub(r"(?<=\.options)\..*", "", key) for key in setting.findall(line)}
            wrong += [f"{page.relative_to(ROOT)}:{number}: {name}" for name in (named - options) | (keys - settings)]
    assert not wrong
