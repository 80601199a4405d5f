import numpy as np
import pandas as pd
import pytest

from its2clr.cohort import Cohort
from its2clr.errors import InputError
from its2clr.run.scores import Model, RunScores


@pytest.fixture(scope="module")
def scores(evaluated_run):
    return RunScores(evaluated_run)


def test_every_bag_of_every_model_is_there(scores):
    cohort = Cohort.open(scores.cohort.path)
    assert scores.models == [Model("start", "dsmil"), Model("refined", "dsmil")]
    assert scores.best == Model("refined", "dsmil")
    table = pd.read_parquet(scores.run / "predictions.parquet")
    for model in scores.models:
        own = table[(table["encoder"] == model.encoder) & (table["aggregator"] == model.aggregator)]
        assert len(own) == cohort.n_instances
        for bag_id in cohort.bags["bag_id"]:
            found = scores.bag(bag_id, model)
            rows = own[own["bag_id"] == bag_id]
            np.testing.assert_array_equal(found.instances, rows["probability"])
            np.testing.assert_array_equal(found.coords, rows[["x", "y"]])
            np.testing.assert_array_equal(found.truth, rows["label"])
            assert found.probability == rows["bag_probability"].iloc[0]


def test_rounds_are_those_of_the_refinement(scores):
    assert scores.rounds
    first = scores.round(scores.rounds[0])
    assert set(first["bag_id"]) == set(scores.cohort.split("train").bags["bag_id"])


def test_what_is_not_there_is_said(scores, tmp_path):
    with pytest.raises(InputError, match="no predictions for bag 'x'"):
        scores.bag("x")
    with pytest.raises(InputError, match="no model start \\+ max"):
        scores.bag("x", Model("start", "max"))
    with pytest.raises(InputError, match="no round after epoch 99"):
        scores.round(99)
    with pytest.raises(InputError, match="not a run"):
        RunScores(tmp_path)
