import numpy as np
import pytest
from tests.conftest import TINY

from its2clr import ItS2CLR
from its2clr.cohort import Cohort
from its2clr.errors import InputError


@pytest.fixture(scope="module")
def model(tiny_cohort, tmp_path_factory):
    overrides = {}
    for override in TINY:
        key, _, value = override.partition("=")
        import yaml

        overrides[key] = yaml.safe_load(value)
    run = tmp_path_factory.mktemp("estimator") / "run"
    return ItS2CLR("demo", run=run, overrides=overrides, verbose=False).fit(tiny_cohort)


def test_predictions_agree_with_evaluation(model, tiny_cohort):
    from sklearn.metrics import roc_auc_score

    test = Cohort.open(tiny_cohort).split("test")
    probabilities = model.predict_proba(test)
    assert probabilities.shape == (len(test), 2)
    assert np.allclose(probabilities.sum(1), 1)
    instances = model.predict_instances(test)
    assert len(instances) == test.n_instances
    assert instances["probability"].between(0, 1).all()
    results = model.evaluate()
    assert len(results["its2clr"]["test"]["bag"]["auc"]["values"]) == 2
    assert 0 <= roc_auc_score(test.bags["label"], probabilities[:, 1]) <= 1
    assert set(model.predict(test)) <= {0, 1}


def test_features_per_bag(model, tiny_cohort):
    test = Cohort.open(tiny_cohort).split("test")
    features = model.transform(test)
    assert list(features) == list(test.bags["bag_id"])
    assert {part.shape for part in features.values()} == {(16, 16)}


def test_a_fitted_run_is_opened_again(model, tiny_cohort):
    again = ItS2CLR(run=model.run, verbose=False)
    assert np.array_equal(again.predict_proba(tiny_cohort), model.predict_proba(tiny_cohort))


def test_predicting_before_fitting_is_said(tiny_cohort, tmp_path):
    with pytest.raises(InputError, match="no run has begun"):
        ItS2CLR(run=tmp_path / "none", verbose=False).predict_proba(tiny_cohort)
