"""The registry and the messages of the contract."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from its2clr.aggregators import Aggregator, BagOutput, aggregator_names, base, create_aggregator, register
from its2clr.aggregators.base import AGGREGATORS
from its2clr.errors import InputError


def test_names():
    expected = ["attention", "dsmil", "instance_attention", "log_mean_exp", "max", "smooth_max", "top_k", "transformer"]
    assert aggregator_names() == expected


def test_unknown_name_says_the_known_and_the_closest():
    with pytest.raises(
        InputError, match=r"'ds_mil', did you mean 'dsmil'\? \(known: attention, dsmil,.*torchmil:ABMIL"
    ):
        create_aggregator("ds_mil", 4)


def test_unknown_option_says_the_known_and_the_closest():
    with pytest.raises(InputError, match=r"'ration' of aggregator 'top_k', did you mean 'ratio'\? \(known: ratio\)"):
        create_aggregator("top_k", 4, ration=0.1)
    with pytest.raises(InputError, match=r"'ratio' of aggregator 'max' \(known: none\)"):
        create_aggregator("max", 4, ratio=0.1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("top_k", {"ratio": 0.0}),
        ("top_k", {"ratio": 1.1}),
        ("top_k", {"ratio": "many"}),
        ("attention", {"dropout": 1.0}),
        ("attention", {"hidden_dim": 0}),
        ("dsmil", {"loss_weight": -1}),
        ("transformer", {"blocks": 0}),
    ],
)
def test_unfit_option_is_refused(name, options):
    (option,) = options
    with pytest.raises(InputError, match=f"option '{option}' of aggregator '{name}'"):
        create_aggregator(name, 8, **options)


def test_option_given_as_text_is_read():
    assert create_aggregator("top_k", 4, ratio="0.2").ratio == 0.2


def test_heads_must_divide_with_advice():
    with pytest.raises(InputError, match=r"divide the feature dimension 12, got 8; use one of 1, 2, 3, 4, 6, 12"):
        create_aggregator("transformer", 12)


def test_plugin_gets_padding_handled(monkeypatch):
    monkeypatch.setattr(base.AGGREGATORS, "_known", dict(base.AGGREGATORS._known))

    @register("first")
    class First(Aggregator):
        def aggregate(self, features, mask):
            logits = features.sum(-1)
            return BagOutput(logits.sum(-1), logits, mask / mask.sum(-1, keepdim=True))

    aggregator = create_aggregator("first", 2)
    assert isinstance(aggregator, First)
    features = torch.tensor([[[1.0, 2.0], [float("nan"), 1.0]]])
    output = aggregator(features, torch.tensor([[True, False]]))
    assert output.bag_logit.tolist() == [3.0]
    assert output.instance_logits.tolist() == [[3.0, -float("inf")]]
    with pytest.raises(InputError, match="an aggregator named 'first' already"):
        register("first")(type("Second", (Aggregator,), {}))


def test_wrong_shapes_are_refused():
    aggregator = create_aggregator("max", 4)
    with pytest.raises(InputError, match=r"\(bags, instances, 4\), got \(2, 3, 5\)"):
        aggregator(torch.zeros(2, 3, 5))
    with pytest.raises(InputError, match="boolean mask of shape"):
        aggregator(torch.zeros(2, 3, 4), torch.ones(2, 3))


def test_the_page_of_aggregators_names_their_options():
    """A row names every option, or ends with `...`; what is in brackets explains an option."""
    page = (Path(__file__).parents[2] / "docs" / "aggregators.md").read_text(encoding="utf-8")
    table = page.split("\n\n")[2].splitlines()
    assert table[0] == "| name | bag | instance scores | options |"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert sorted(row[0].strip("`") for row in rows) == sorted(aggregator_names())
    for name, _, _, cell in rows:
        named = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", cell))
        options = set(inspect.signature(AGGREGATORS.find(name.strip("`"))).parameters) - {"feature_dim"}
        assert set(named) <= options, name
        assert cell.endswith("...") or set(named) == options, name
