"""The example of docs/extending.md, run as it stands there."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from tests.conftest import TINY
from tests.end_to_end.commands import ROOT

from its2clr import plugins
from its2clr.aggregators import create_aggregator
from its2clr.errors import InputError
from its2clr.plugins import allow_named, import_plugins
from its2clr.run.evaluation import evaluate
from its2clr.run.opening import open_run
from its2clr.run.results_file import results_rows


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch):
    monkeypatch.setattr(plugins, "_allowed", set())


PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "mine.py"
    match = re.search(r'```python title="mine.py"\n(.*?)```', PAGE, re.DOTALL)
    assert match is not None
    path.write_text(match[1], encoding="utf-8")
    return path


@pytest.fixture
def settings(plugin) -> list[str]:
    """What the page's command sets."""
    match = re.search(r"```bash\n(its2clr fit .*?)```", PAGE, re.DOTALL)
    assert match is not None
    words = shlex.split(match[1].replace("\\\n", " "))
    chosen = [words[number + 1] for number, word in enumerate(words) if word == "--set"]
    assert "plugins=[mine.py]" in chosen
    return [text.replace("mine.py", str(plugin)) for text in chosen]


def test_the_example_trains_and_goes_on(tiny_cohort, settings, tmp_path):
    allow_named(settings)
    stages = open_run(tmp_path / "run", tiny_cohort, "demo", [*TINY, *settings], quiet=True)
    stages.fit()
    rows = results_rows(evaluate(stages))
    assert [row[0] for row in rows] == ["barlow_twins + log_sum_exp", "hinge finetuning + log_sum_exp"]
    assert open_run(tmp_path / "run", quiet=True).run.done("evaluate") is not None


def test_a_pretraining_method_nobody_registered_is_said_with_its_closest(tiny_cohort, tmp_path):
    with pytest.raises(InputError, match="unknown pretraining method 'simcrl', did you mean 'simclr'"):
        open_run(tmp_path / "run", tiny_cohort, "demo", [*TINY, "pretrain.method=simcrl"], quiet=True)


def test_the_example_keeps_the_contract(plugin):
    plugins.allow_plugins([str(plugin)])
    import_plugins([str(plugin)])
    torch.manual_seed(0)
    aggregator = create_aggregator("log_sum_exp", 8, sharpness=3.0)
    bags = [torch.randn(size, 8) for size in (3, 7)]
    padded = torch.full((2, 9, 8), torch.nan)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    for number, bag in enumerate(bags):
        padded[number, : len(bag)], mask[number, : len(bag)] = bag, True
    together = aggregator(padded, mask)
    for number, bag in enumerate(bags):
        alone = aggregator(bag[None])
        torch.testing.assert_close(together.bag_logit[number], alone.bag_logit[0])
        torch.testing.assert_close(together.instance_logits[number, : len(bag)], alone.instance_logits[0])


def test_mistakes_in_plugins_are_said(tmp_path):
    plugins.allow_plugins()
    with pytest.raises(InputError, match="there is no file"):
        import_plugins([str(tmp_path / "absent.py")])
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    with pytest.raises(InputError, match=r"broken.py cannot be imported: ModuleNotFoundError"):
        import_plugins([str(broken)])
    with pytest.raises(InputError, match=r"no.such.module cannot be imported"):
        import_plugins(["no.such.module"])
