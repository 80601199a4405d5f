import pytest

from its2clr.errors import InputError
from its2clr.experiments.collect import Found, Point, _points, _summary
from its2clr.experiments.metrics import NO_TRUTH, NOT_MEASURED, Value, read_metric
from its2clr.experiments.pages import curves_markdown, table_frame, table_markdown
from its2clr.experiments.spec import Experiment, experiments
from its2clr.experiments.verdicts import compare, sentences


def spec(methods="columns"):
    rows, columns = {"A": {}, "B": {}}, {"SimCLR": {"method": "simclr"}, "ItS2CLR": {"method": "its2clr"}}
    paper = {"A": [80, 90], "B": [95, 90]}
    if methods == "rows":
        rows, columns = columns, rows
        paper = {"SimCLR": [80, 95], "ItS2CLR": [90, 90]}
    values = {"label": "tab:x", "title": "x", "kind": "table", "paper_data": "x", "cell": {"metric": "bag_auc"}}
    return Experiment.model_validate(
        {**values, "rows": rows, "columns": columns, "methods": methods, "reference": "ItS2CLR", "paper": paper}
    )


@pytest.mark.parametrize("methods", ["rows", "columns"])
@pytest.mark.parametrize(
    ("simclr", "expected"),
    [
        ({0: 70, 1: 60}, ["same", "reversed"]),
        ({0: 86, 1: 74}, ["level", "level"]),
        ({0: 95, 1: 85}, ["reversed", "same"]),
        ({1: 70}, ["unknown", "unknown"]),
    ],
)
def test_order_against_the_paper_is_judged_seed_by_seed(methods, simclr, expected):
    """Seeds lie 10 apart, their differences do not: only these count."""
    place = (lambda line, method: (line, method)) if methods == "columns" else (lambda line, method: (method, line))
    found = {}
    for line in "AB":
        found[place(line, "SimCLR")] = Found(0.0, 7.0, "seeds", simclr)
        found[place(line, "ItS2CLR")] = Found(80.0, 7.0, "seeds", {0: 85.0, 1: 75.0, 2: 80.0})
    comparisons = compare(spec(methods), found)
    assert [one.verdict for one in comparisons] == expected
    text = sentences(spec(methods), comparisons)
    if expected[0] == "unknown":
        assert "no spread" in text
        return
    assert f"{expected.count('same')} of 2 comparisons have the paper's order" in text
    assert ("A, SimCLR: -10.00 ± 0.00 (paper +10.00)" in text) == (expected[0] == "reversed")


@pytest.mark.parametrize(("lost", "verdict"), [([0.1] * 5 + [30], "same"), ([0.1] * 4 + [30], "level"),
    ([0.1] * 6 + [-0.1, 30], "level"), ([0.1] * 5 + [-30], "level")])  # fmt: skip
def test_a_method_that_fails_in_some_seeds_is_not_level(lost, verdict):
    """Its spread is as large as its loss; six seeds that all agree are beyond chance, five are not."""
    seeds = dict.fromkeys(range(len(lost)), 90.0)
    found = {(line, "ItS2CLR"): Found(90.0, 0.0, "seeds", seeds) for line in "AB"}
    for line in "AB":
        found[line, "SimCLR"] = Found(0.0, 0.0, "seeds", {seed: 90 - less for seed, less in enumerate(lost)})
    assert compare(spec(), found)[0].verdict == verdict


def test_what_the_paper_does_not_compare_is_said_apart():
    values = spec("rows").model_dump()
    values["paper"] = {"SimCLR": [80, None], "ItS2CLR": [90, None]}
    table = Experiment.model_validate(values)
    numbers = {"SimCLR": {0: 70.0, 1: 71.0}, "ItS2CLR": {0: 80.0, 1: 82.0}}
    found = {(method, line): Found(0.0, values=numbers[method]) for method in numbers for line in "AB"}
    comparisons = compare(table, found)
    assert [(one.line, one.verdict) for one in comparisons] == [("A", "same"), ("B", "unknown")]
    text = sentences(table, comparisons)
    assert "1 of 1 comparisons have the paper's order" in text
    assert "Not in the paper, as ItS2CLR minus the other: B, SimCLR: +10.50 ± 0.71." in text
    assert "not in the paper" in table_markdown(table, found)
    assert table_frame(table, found)["paper"].isna().sum() == 2


def test_a_table_has_both_numbers_and_says_why_ours_is_missing():
    reason = "x" * 300 + "\nTraceback"
    found = {(line, "ItS2CLR"): Found(90.126, 0.5, "seeds", {0: 90.126}) for line in "AB"}
    found |= {(line, "SimCLR"): Found(reason=reason) for line in "AB"}
    assert table_markdown(spec(), found).split("\n") == [
        "| | SimCLR | ItS2CLR |",
        "|---|---|---|",
        "| A | -<sup>1</sup><br>*paper 80.00* | **90.13** ± 0.50<br>*paper 90.00* |",
        "| B | -<sup>1</sup><br>*paper 95.00* | **90.13** ± 0.50<br>*paper 90.00* |",
        "",
        f"<sup>1</sup> {'x' * 200}  ",
    ]
    rows = table_frame(spec(), found).set_index(["row", "column"])
    assert rows.loc[("A", "SimCLR"), "reason"] == reason  # whole
    assert (rows.loc[("B", "ItS2CLR"), "values"], rows.loc[("B", "SimCLR"), "paper"]) == ("0:90.126", 95)


def test_missing_numbers_are_not_compared():
    found = {(line, method): Found(reason="failed") for line in "AB" for method in ("SimCLR", "ItS2CLR")}
    assert compare(spec(), found) == []
    assert sentences(spec(), []) == ""


def test_the_witness_rate_is_no_method():
    table = experiments()["tab:WR_exp"]
    found = {place: Found(50.0, values={0: 50.0}) for place in table.cells()}
    assert len(compare(table, found)) == 6 * 3


def test_spread_is_over_seeds_and_with_one_seed_over_retrainings():
    two = _summary({0: Value(0.8, 0.5), 2: Value(0.9, 0.5)}, 100, None)
    assert two.values == {0: pytest.approx(80), 2: pytest.approx(90)}
    assert (two.mean, two.over) == (pytest.approx(85), "seeds")
    assert two.spread == pytest.approx(7.0710678)
    one = _summary({0: Value(0.8, 0.02)}, 100, None)
    assert (one.spread, one.over) == (pytest.approx(2), "retrainings")
    assert _summary({0: Value(0.8)}, 1, None).spread is None
    assert _summary({}, 1, "failed").reason == "failed"


def test_points_of_curves_are_joined_by_epoch():
    points = _points([{0: 0.5, 3: 0.7}, {0: 0.7, 3: None}])
    assert [(point.x, point.mean) for point in points] == [(0, pytest.approx(0.6)), (3, 0.7)]
    assert [point.spread for point in points] == [pytest.approx(0.1414214), None]


@pytest.mark.parametrize(
    ("values", "highest", "back"),
    [
        ([0.36, 0.60, 0.21, 0.50, 0.73], "0.730 (at 4)", "0.600 (at 1) to 0.210 (at 2)"),
        ([0.36, 0.60, 0.21], "0.600 (at 1)", "0.360 (at 0) to 0.600 (at 1)"),
        ([0.4, 0.9, 0.8], "0.900 (at 1)", "0.900 (at 1) to 0.800 (at 2)"),
        ([0.7, 0.2, 0.6, 0.3], "0.700 (at 0)", "0.200 (at 1) to 0.600 (at 2)"),
        ([0.4, 0.5, 0.50004, 0.5], "0.500 (at 2)", "none"),
        ([0.5], "0.500 (at 0)", "none"),
    ],
)
def test_a_curve_that_rises_and_falls_shows_it(values, highest, back):
    points = [Point(x, value, None) for x, value in enumerate(values)]
    assert curves_markdown({("A", "Recall"): points}).split("\n") == [
        "| line | first | highest | last | largest way back |",
        "|---|---|---|---|---|",
        f"| A, Recall | {values[0]:.3f} (at 0) | {highest} | {values[-1]:.3f} (at {len(values) - 1}) | {back} |",
    ]


def test_a_spread_is_shown_where_there_is_one():
    table = curves_markdown({("A", "Recall"): [Point(0, 0.5, 0.0), Point(5, 0.6, 0.25)]})
    assert "| A, Recall | 0.500 ± 0.000 (at 0) | 0.600 ± 0.250 (at 5) | 0.600 ± 0.250 (at 5) | none |" in table
    found = {place: Found(90.0, 0.0, "seeds", {0: 90.0, 1: 90.0}) for place in spec().cells()}
    found["A", "SimCLR"] = Found(90.0, None, None, {0: 90.0})
    assert "| A | **90.00**<br>*paper 80.00* | **90.00** ± 0.00<br>*paper 90.00* |" in table_markdown(spec(), found)


def test_metrics_are_found_in_results():
    summary = {"mean": 0.9, "std": 0.1, "values": [0.8, 1.0]}
    results = {
        "cohort": {"witness_rate": 0.1},
        "seconds": {"refine": 20.0, "round": 9.0},
        "rounds": [
            {"epoch": 0, "improved": True, "instance_auc": 0.7},
            {"epoch": 3, "improved": True, "instance_auc": 0.8},
            {"epoch": 6, "improved": False, "instance_auc": 0.85},
        ],
        "refined": {
            "test": {"bag": {"auc": summary}},
            "aggregators": {"max": {"bag": {"auc": {**summary, "mean": 0.7}}}},
            "linear_probe": {"dice": 0.4},
        },
    }

    def read(metric, aggregator=None, round_="best"):
        return read_metric(results, "refine", metric, aggregator, round_, 100.0)

    assert read("bag_auc") == Value(0.9, 0.1)
    assert read("bag_auc", "max") == Value(0.7, 0.1)
    assert read("instance_auc") == NO_TRUTH
    assert read("bag_auc", "top_k") == read("bag_f1") == NOT_MEASURED
    with pytest.raises(InputError, match="no metric named 'bag_aux', did you mean 'bag_auc'"):
        read("bag_aux")
    assert read("probe_dice") == Value(0.4)
    assert read("training_instance_auc") == Value(0.8)
    assert read("training_instance_auc", round_="first") == Value(0.7)
    assert read("witness_rate") == Value(0.1)
    assert read("refine_time_share") == Value(0.2)
    assert read("round_time_share") == Value(0.03)
