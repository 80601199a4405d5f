import statistics

import pytest

from its2clr.errors import InputError
from its2clr.evaluation import summarise


def test_mean_and_sample_deviation():
    aucs = [0.91, 0.94, 0.90, 0.93]
    summary = summarise([{"auc": auc, "f1": 1 - auc} for auc in aucs])
    assert summary["auc"]["mean"] == pytest.approx(statistics.mean(aucs))
    assert summary["auc"]["std"] == pytest.approx(statistics.stdev(aucs))
    assert summary["auc"]["values"] == aucs
    assert list(summary) == ["auc", "f1"]


def test_one_retraining_has_no_deviation():
    assert summarise([{"auc": 0.9}]) == {"auc": {"mean": 0.9, "std": 0.0, "values": [0.9]}}


def test_wrong_input_is_named():
    with pytest.raises(InputError, match="got none"):
        summarise([])
    with pytest.raises(InputError, match=r"\['auc'\] in each, got \['f1'\] in number 1"):
        summarise([{"auc": 0.9}, {"f1": 0.9}])
