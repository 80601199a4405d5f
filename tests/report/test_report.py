import base64
import hashlib
import json
import re
import shlex
import shutil
import time

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from report_pages import Page
from scipy.stats import binomtest
from sklearn.decomposition import PCA
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

from its2clr.cohort import Cohort
from its2clr.cohort.tiles import decode
from its2clr.evaluation.bags import BAG_METRICS
from its2clr.evaluation.thresholds import balanced_accuracy_threshold
from its2clr.report import figure_data, page_tables, words, write_report
from its2clr.report.run_facts import Scored, called_at_validation, collect
from its2clr.report.shown_tiles import embedded, pictures, ranked, wrong_bags, wrong_instances
from its2clr.run.results_file import results_rows
from its2clr.run.saved import read_run_config
from its2clr.run.scores import Model
from its2clr.settings import resolve_config


@pytest.fixture(scope="module")
def html(evaluated_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "page.html"
    assert write_report(evaluated_run, out) == out
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


@pytest.fixture(scope="module")
def results(evaluated_run):
    return json.loads((evaluated_run / "results.json").read_text())


def test_numbers_are_those_of_the_results(page, results):
    rows = {row[0]: row[1:] for row in page.tables["bag-results"]}
    assert rows["model"] == ["AUC", "AUPRC", "balanced accuracy", "F1", "sensitivity", "specificity"]
    for name, encoder in (("SimCLR + dsmil", "start"), ("ItS2CLR + dsmil", "refined")):
        found = results[encoder]["test"]
        for cell, metric in zip(rows[name], BAG_METRICS, strict=True):
            low, high = found["bag_intervals"][metric]
            number = found["bag"][metric]
            assert cell == f"{number['mean']:.3f} ± {number['std']:.3f} [{low:.3f}, {high:.3f}]"
        instance = next(row for row in page.tables["instance-results"] if row[0] == name)
        low, high = found["instance_auc_interval"]
        assert instance[1] == f"{found['instance_auc']:.3f} ± {found['instance_auc_std']:.3f} [{low:.3f}, {high:.3f}]"
        assert [cell.split(" ")[0] for cell in instance[2:]] == [
            f"{found['instance'][metric]['mean']:.3f}" for metric in ("auprc", "max_f1", "dice", "iou")
        ]
    rounds = page.tables["rounds-table"]
    assert len(rounds) == 1 + len(results["rounds"])
    for row, found, health in zip(rounds[1:], results["rounds"], results["health"]["rounds"], strict=True):
        cells = dict(zip(rounds[0], row, strict=True))
        assert cells["epoch"] == str(found["epoch"])
        assert cells["validation bag AUC"] == f"{found['validation_auc']:.3f}"
        assert cells["AUC"] == f"{found['instance_auc']:.3f}"
        assert cells["pseudo labels"] == ("replaced" if found["pseudo_labels_replaced"] else "kept")
        assert cells["positive share"] == f"{health['positive_share']:.1%}"
    splits = {row[0]: row[1:] for row in page.tables["cohort-splits"]}
    for split, found in results["cohort"]["splits"].items():
        assert splits[split][:2] == [str(found["bags"]), str(found["positive_bags"])]


def test_words_say_what_may_be_claimed(page, results):
    low, high = results["comparison"]["bag_auc_difference_interval"]
    assert f"{results['comparison']['bag_auc_difference']:+.3f} (95% interval {low:+.3f} to {high:+.3f})" in page.text
    one, other = (results[name]["test"]["bag_auc_interval"] for name in ("refined", "start"))
    overlap = one[0] <= other[1] and other[0] <= one[1]
    assert ("The two intervals overlap" in page.text) == overlap
    claimed = "more than chance" in page.text
    assert claimed == (low > 0 or high < 0)
    splits = results["cohort"]["splits"]["test"]
    assert f"On {splits['bags']} test bags ({splits['positive_bags']} positive" in page.text
    assert "This is a small test" in page.text
    for warning in results["health"]["warnings"]:
        assert warning in page.text


def test_words_about_a_course_tell_what_lies_between_its_ends(page, results):
    rounds = [{"epoch": 5 * number, "validation_auc": auc} for number, auc in enumerate((0.6, 0.9, 0.4))]
    assert words.rounds_words(rounds, 5) == (
        "Of 3 rounds, the encoder of epoch 5 was kept, with a validation bag AUC of 0.900; the first (epoch 0) has "
        "0.600 and the last (epoch 10) 0.400."
    )
    assert words.rounds_words(results["rounds"], results["refine"]["best_epoch"]) in page.text
    losses, spreads = (3.0, 1.0, 5.0, 2.0), (0.5, 0.4, 0.3, 0.2)
    metrics = [
        {"stage": "refine", "epoch": epoch, "loss": loss, "spread": spread}
        for epoch, (loss, spread) in enumerate(zip(losses, spreads, strict=True), start=1)
    ]
    assert words.training_words(metrics) == [
        (
            "Refinement: the loss went from 3.000 to 2.000, lowest 1.000 in epoch 2, highest 5.000 in epoch 3; "
            "the spread of the embeddings, 0 for one point, from 0.500 to 0.200."
        )
    ]


def test_one_retraining_is_shown_without_a_deviation():
    once = {"mean": 0.9, "std": None, "values": [0.9]}
    found = {"bag": {"auc": once}, "bag_auc_interval": [0.8, 1.0], "bag_auc": 0.9, "bag_auc_std": None}
    scored = Scored(Model("refined", "dsmil"), "ItS2CLR + dsmil", found, pd.DataFrame(), None)
    assert page_tables.bag_results([scored]).rows[0][1][:2] == ("0.900", "[0.800, 1.000]")
    results = {"aggregator": "dsmil", "names": {"refined": "ItS2CLR"}, "refined": {"test": found}}
    assert results_rows(results) == [("ItS2CLR + dsmil", "0.900 [0.800, 1.000]", "-")]


def test_advice_names_the_setting_that_the_run_has(results):
    config = resolve_config("demo").refine
    for rule, wanted, other in (
        ("fixed", "raise refine.threshold", "false_positive_rate"),
        ("negative_bags", "lower refine.false_positive_rate", "refine.threshold"),
    ):
        checks = words.health_checks(results["health"], config.model_copy(update={"threshold_rule": rule}))
        said = " ".join(check.meaning for check in checks)
        assert wanted in said
        assert other not in said


def test_bags_and_decisions_are_those_of_the_predictions(page, evaluated_run):
    table = pd.read_csv(evaluated_run / "bag_predictions.csv", dtype={"bag_id": str})
    own = table[table["encoder"] == "refined"].set_index("bag_id")
    test = own[own["split"] == "test"]
    header, *rows = page.tables["test-bags"]
    assert {row[0] for row in rows} == set(test.index)
    errors = []
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        assert cells["ItS2CLR + dsmil"] == f"{test.loc[row[0], 'probability']:.3f}"
        assert cells["label"] == ("positive" if test.loc[row[0], "label"] else "negative")
        errors.append(abs(test.loc[row[0], "label"] - test.loc[row[0], "probability"]))
    assert errors == sorted(errors, reverse=True)
    found = called_at_validation(collect(evaluated_run).models)["ItS2CLR + dsmil"]
    validation = own[own["split"] == "val"]
    assert found.threshold == balanced_accuracy_threshold(validation["label"], validation["probability"])
    assert found.threshold != balanced_accuracy_threshold(test["label"], test["probability"])
    called = test["probability"] >= found.threshold
    wrong = int((called != (test["label"] == 1)).sum())
    assert found.false_negatives + found.false_positives == wrong
    assert sum(row[-1] == "WRONG" for row in rows) == wrong


@pytest.mark.parametrize("count", [30, 5000])
def test_curves_are_scikit_learns(count):
    generator = np.random.default_rng(count)
    labels = (generator.random(count) < 0.3).astype(np.int64)
    scores = np.round(generator.normal(size=count) + labels, 3)
    found, expected = figure_data.roc(labels, scores), roc_curve(labels, scores, drop_intermediate=False)[:2]
    assert found.area == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert {*zip(found.x, found.y, strict=True)} <= {*zip(*expected, strict=True)}
    assert len(found.x) <= figure_data.MOST_POINTS + 2
    assert np.trapezoid(found.y, found.x) == pytest.approx(found.area, abs=2e-3)
    assert (found.x[0], found.y[0], found.x[-1], found.y[-1]) == (0, 0, 1, 1)
    found = figure_data.precision_recall(labels, scores)
    precision, recall, _ = precision_recall_curve(labels, scores)
    assert found.area == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    assert {*zip(found.x, found.y, strict=True)} <= {*zip(recall, precision, strict=True)}
    assert -np.sum(np.diff(found.x) * found.y[:-1]) == pytest.approx(found.area, abs=5e-3)


def test_reliability_counts_every_bag():
    labels = np.array([0, 0, 1, 1, 1, 0])
    probabilities = np.array([0.0, 0.1, 0.15, 0.9, 1.0, 0.5])
    found = figure_data.reliability(labels, probabilities)
    assert [(one.bags, round(one.positive, 3)) for one in found] == [(3, 0.333), (1, 0.0), (2, 1.0)]
    assert found[0].predicted == pytest.approx(0.25 / 3)
    assert all(one.low <= one.positive <= one.high for one in found)
    for one in found:
        expected = binomtest(round(one.positive * one.bags), one.bags).proportion_ci(method="wilson")
        assert (one.low, one.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_the_plane_is_that_of_scikit_learns_components():
    features = np.random.default_rng(0).normal(size=(40, 5)) * [5, 3, 1, 1, 0.5]
    fitted = np.arange(0, 40, 2)
    places, shares = figure_data.in_plane(features, fitted)
    expected = PCA(2, svd_solver="full").fit(features[fitted])
    np.testing.assert_allclose(places, expected.transform(features), atol=1e-9)
    np.testing.assert_allclose(shares, expected.explained_variance_ratio_)


def test_tiles_are_the_right_ones(evaluated_run):
    facts = collect(evaluated_run)
    best = facts.best
    positive = set(best.bags.query("split == 'test' and label == 1")["bag_id"])
    rows = ranked(best.instances, positive, highest=True, count=5)
    of_positive = best.instances[best.instances["bag_id"].isin(positive)]
    assert rows["probability"].iloc[0] == of_positive["probability"].max()
    assert rows["bag_id"].value_counts().max() <= 2
    assert ranked(best.instances, positive, highest=False)["probability"].iloc[0] == of_positive["probability"].min()
    for picture, row in zip(pictures(facts.cohort, rows), rows.to_dict("records"), strict=True):
        tile = decode(Cohort.open(facts.cohort_path).tile_file(row["bag_id"]).encoded(row["instance"]))
        assert picture.uri == embedded(Image.fromarray(tile))
        assert (picture.bag_id, picture.probability, picture.truth) == (row["bag_id"], row["probability"], row["label"])


def test_mistakes_are_the_most_confident():
    bags = pd.DataFrame({"bag_id": list("abcdef"), "label": [1, 1, 1, 0, 0, 0], "probability": [0.1, 0.05, 0.9] * 2})
    assert wrong_bags(bags, 0.5, 1)["bag_id"].tolist() == ["b", "a"]
    assert wrong_bags(bags, 0.5, 0)["bag_id"].tolist() == ["f"]
    instances = bags.assign(instance=range(6))
    assert wrong_instances(instances, 1, 0.1)["bag_id"].tolist() == ["b"]
    assert wrong_instances(instances, 1, 0.5)["bag_id"].tolist() == ["b", "a"]
    assert wrong_instances(instances, 0, 0.1)["bag_id"].tolist() == ["f", "d"]  # 0.1 is positive from 0.1 on


def test_the_page_is_one_file_that_loads_nothing(page, html):
    assert not re.search(r"https?:|src\s*=\s*[\"']?//|url\(\s*[\"']?(?!#)|@import", html)
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "form", "base", "audio", "video"}
        for name in ("src", "xlink:href", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/", "#")), (tag, value)
        assert not any(name.startswith("on") for name in attributes)
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert len(html) < 3_000_000


def test_the_page_can_be_read_without_eyes_and_mouse(page):
    assert all(picture["alt"] for picture in page.all("img"))
    assert all(svg["aria-label"] for svg in page.all("svg"))
    assert len(page.all("svg")) >= 7
    assert len(page.ids) == len(set(page.ids))
    linked = {link["href"][1:] for link in page.all("a")}
    assert linked <= set(page.ids)
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert max(np.diff(headings)) <= 1
    assert all(heading["aria-sort"] == "none" for heading in page.all("th") if "aria-sort" in heading)
    assert sum("aria-sort" in heading for heading in page.all("th")) == len(page.all("button"))


def test_the_command_makes_the_same_settings(evaluated_run):
    config, cohort = read_run_config(evaluated_run)
    command, recipe = words.command_again(evaluated_run, cohort, config)
    assert recipe == "demo"
    typed = shlex.split(command)
    overrides = [typed[place + 1] for place, word in enumerate(typed) if word == "--set"]
    assert resolve_config(recipe, overrides) == config
    assert len(overrides) < 20


HOSTILE = "<script>alert('x')</script>\"../../$x_{$ & <img src=x onerror=alert(1)>"


def test_hostile_names_do_no_harm(evaluated_run, tmp_path):
    """Bags, groups and aggregators may be called anything, also where the cohort is gone."""
    run = tmp_path / "run <b>&"
    shutil.copytree(evaluated_run, run)
    config = (run / "config.yaml").read_text().splitlines()
    config[0] = f"cohort: {json.dumps(str(tmp_path / HOSTILE.replace('/', '_')))}"
    (run / "config.yaml").write_text("\n".join(config))
    table = pd.read_csv(run / "bag_predictions.csv", dtype=str)
    first = table.loc[table["split"] == "test", "bag_id"].iloc[0]
    table["bag_id"] = table["bag_id"].replace(first, HOSTILE)
    table["group"] = HOSTILE
    table.loc[table["encoder"] == "start", "aggregator"] = HOSTILE
    table.to_csv(run / "bag_predictions.csv", index=False)
    results = json.loads((run / "results.json").read_text())
    results["start"]["aggregators"] = {HOSTILE: results["start"]["test"]}
    results["health"]["warnings"] = [HOSTILE]
    (run / "results.json").write_text(json.dumps(results))
    html = write_report(run).read_text(encoding="utf-8")
    page = Page(html)
    assert len(page.scripts) == 1
    assert "alert" not in page.scripts[0]
    assert HOSTILE in page.text
    assert HOSTILE in [row[0] for row in page.tables["test-bags"]]
    assert any(HOSTILE in row[0] for row in page.tables["bag-results"])
    assert not any("onerror" in attributes for _, attributes in page.elements)
    assert len(page.all("img")) == 0
    assert "The cohort cannot be shown" in page.text


def test_ten_thousand_bags_stay_a_page(evaluated_run, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", "state.json", "metrics.jsonl"):
        shutil.copy(evaluated_run / name, run / name)
    (run / "config.yaml").write_text(
        re.sub("^cohort: .*", f"cohort: {tmp_path / 'gone'}", (run / "config.yaml").read_text(), count=1)
    )
    results = json.loads((evaluated_run / "results.json").read_text())
    results["cohort"]["splits"] = {"test": {"bags": 10_000, "positive_bags": 5000, "instances": 10**7}}
    (run / "results.json").write_text(json.dumps(results))
    generator = np.random.default_rng(0)
    tables = []
    for encoder in ("start", "refined"):
        label = np.arange(12_000) % 2
        tables.append(
            pd.DataFrame(
                {
                    "bag_id": [f"bag-with-a-rather-long-name-{number}" for number in range(12_000)],
                    "label": label,
                    "split": np.where(np.arange(12_000) < 2000, "val", "test"),
                    "group": [f"patient-{number}" for number in range(12_000)],
                    "encoder": encoder,
                    "aggregator": "dsmil",
                    "probability": 1 / (1 + np.exp(-generator.normal(size=12_000) - label)),
                }
            )
        )
    pd.concat(tables).to_csv(run / "bag_predictions.csv", index=False)
    started = time.perf_counter()
    html = write_report(run).read_text(encoding="utf-8")
    assert time.perf_counter() - started < 30
    assert len(html) < 2_000_000
    page = Page(html)
    assert len(page.tables["test-bags"]) == 501
    assert "500 of 10,000 bags" in page.text
    assert "10,000 test bags" in page.text


def test_tables_are_sorted_in_a_browser(html, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = next((path for path in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if shutil.which(path)), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    flags = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags.split())
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        heading = page.locator("#test-bags th", has_text="ItS2CLR + dsmil")
        column = heading.evaluate("heading => heading.cellIndex")
        orders = []
        for wanted in ("ascending", "descending"):
            heading.locator("button").focus()
            page.keyboard.press("Enter")
            assert heading.get_attribute("aria-sort") == wanted
            cells = page.locator(f"#test-bags tbody td:nth-child({column + 1})").all_inner_texts()
            orders.append([float(cell) for cell in cells])
        browser.close()
    assert orders[0] == sorted(orders[0])
    assert orders[1] == sorted(orders[0], reverse=True)
    assert said == []


def test_checks_while_pretraining_are_a_curve_and_the_limit_is_what_was_logged():
    epochs = [{"stage": "pretrain", "epoch": n, "loss": 2.0 - n / 10, "spread": 0.3} for n in (1, 2, 3)]
    checks = [{"stage": "pretrain_check", "epoch": n, "validation_auc": 0.5 + n / 10} for n in (1, 3)]
    drawn = str(figure_data.training([*({**epoch, "collapsed_loss": 5.5} for epoch in epochs), *checks]))
    assert "pretrain: validation bag AUC" in drawn
    assert "one point" in drawn
    assert "pretrain: validation bag AUC" not in str(figure_data.training(epochs))
    assert "one point" not in str(figure_data.training(epochs))
