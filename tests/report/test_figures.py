import math
import re

import numpy as np
import pytest
from report_pages import Page

from its2clr.report import figures
from its2clr.report.figures import COLOURS, Curve, Line, Panel, Reliability
from its2clr.report.svg import Axes, Look, ends, figure, ticks


class Drawn(Page):
    """The texts and lines of a figure, and what its axes say of a place."""

    def __init__(self, svg):
        self.labels = []
        super().__init__(f"<main>{svg}</main>")

    def handle_data(self, data):
        self.labels.append((data, self.elements[-1][1]))
        super().handle_data(data)

    def scale(self, kind, axis):
        """From a place in the figure to a number, by two labels of the first panel's axis."""
        near, far = [
            (float(words), float(given[axis]) - (3 if axis == "y" else 0))
            for words, given in self.labels
            if given.get("class") == kind and re.fullmatch(r"-?[\d.]+", words)
        ][:2]
        return lambda place: near[0] + (place - near[1]) * (far[0] - near[0]) / (far[1] - near[1])

    def points(self, colour):
        """Of each line of a colour, in numbers of the first panel."""
        x, y = self.scale("tick middle", "x"), self.scale("tick end", "y")
        for given in self.all("polyline"):
            if given["stroke"] == colour:
                yield [(x(float(a)), y(float(b))) for a, b in (pair.split(",") for pair in given["points"].split())]


def test_lines_are_where_the_axes_say():
    x, y = np.linspace(0, 1, 7), np.linspace(0, 1, 7) ** 2
    panel = Panel("title", "epoch", [Line("one", x * 70 + 3, y * 0.02 + 5), Line("two", [3, 73], [5.02, 5.01])])
    drawn = Drawn(figures.lines("name", "what it shows", [panel]))
    line = np.array(next(drawn.points(COLOURS[0]))[1:-1])  # its ends are there twice, for their marks
    np.testing.assert_allclose(line[:, 0], x * 70 + 3, atol=0.02)
    np.testing.assert_allclose(line[:, 1], y * 0.02 + 5, atol=2e-5)
    assert {"title", "epoch", "one", "two"} <= {words for words, _ in drawn.labels}


def test_precision_holds_until_the_next_point():
    curve = Curve(np.array([1.0, 0.5, 0.0]), np.array([0.25, 0.5, 1.0]), 0.6)
    drawn = Drawn(figures.rates("name", "bags", {}, {"model": curve}, 0.3))
    points = next(given for given in drawn.all("polyline") if given["stroke"] == COLOURS[0])["points"].split()
    x, y = zip(*(map(float, pair.split(",")) for pair in points), strict=True)
    assert (y[0], x[1], y[2], x[3]) == (y[1], x[2], y[3], x[4])
    assert x[0] > x[1] > x[3]
    assert y[1] > y[2] > y[4]  # the page counts from above


@pytest.mark.parametrize("seed", range(200))
def test_ticks_are_round_and_within(seed):
    generator = np.random.default_rng(seed)
    low, high = ends(generator.normal(size=3) * 10.0 ** generator.integers(-6, 7) + generator.choice([0, 1, 100]))
    found = ticks(low, high)
    places = np.array(list(found))
    assert 2 <= len(found) <= 9
    assert low - 1e-9 * (high - low) <= places.min()
    assert places.max() <= high + 1e-9 * (high - low)
    np.testing.assert_allclose([float(label) for label in found.values()], places, atol=1e-9 * (high - low))
    np.testing.assert_allclose(np.diff(places), places[1] - places[0])
    assert all(float(label).is_integer() for label in ticks(low, high, 5, integer=True).values())


def test_values_all_alike_have_an_axis():
    for value in (0.0, 1.0, -3e5, 1e-7):
        low, high = ends([value] * 3)
        assert low < value < high
        assert ticks(low, high)


def test_marks_and_legends_are_those_of_the_points():
    panel = Panel(
        "t", "epoch", [Line("one", [1, 2, 3], [0.1, 0.5, 0.9])], ("limit", 0.7), [False, True, False], unit=True
    )
    drawn = Drawn(figures.lines("name", "what", [panel]))
    used = [given["marker-mid"][5:-1] for given in drawn.all("polyline") if "marker-mid" in given]
    assert set(used) == {given["id"] for given in drawn.all("marker")} == {"name-0", "name-1"}
    counts = [len(given["points"].split()) - 2 for given in drawn.all("polyline") if "marker-mid" in given]
    assert counts == [3, 1, 1, 1]  # the line, what was kept, and both in the legend
    assert [words for words, given in drawn.labels if given.get("class") == "tick"] == ["one", "labels kept", "limit"]
    alone = Drawn(figures.lines("name", "what", [Panel("t", "epoch", [Line("one", [1], [0.1])])]))
    assert "one" not in [words for words, _ in alone.labels]


def test_bags_are_counted_on_either_side_of_the_line():
    scores, labels = np.array([0.1, 0.11, 0.9, 0.91, 0.92]), np.array([0, 0, 1, 1, 0])
    drawn = Drawn(figures.distributions({"model": (scores, labels)}, {"model": 0.5}))
    y = drawn.scale("tick end", "y")
    heights = {}
    for given in drawn.all("polyline"):
        if given["fill"] in COLOURS and given["points"].count(",") > 4:
            heights[given["fill"]] = [round(y(float(pair.split(",")[1])), 1) for pair in given["points"].split()]
    assert not any(words.startswith("-") for words, _ in drawn.labels)
    read = {colour: max(found, key=abs) for colour, found in heights.items()}
    assert read == {COLOURS[0]: 2, COLOURS[1]: -2}  # mirrored: the first two labels, below the line, have no sign


def test_all_stays_on_the_page_whatever_its_names():
    names = ["a name that is much longer than what one wants to read", "<b>&'", "病理切片模型" * 6]
    bins = [Reliability(0.5, 0.5, 0.1, 0.9, 12)]
    for svg in (
        figures.intervals(names, {"AUC": [(0.7, 0.1, 0.9)] * 3, "other": [None, (0.9, 0.8, 1.0), None]}),
        figures.calibration(dict.fromkeys(names, bins)),
        figures.maps(
            dict.fromkeys(names, (np.eye(3)[:, :2], np.ones(2))),
            np.array([1, 0, -1]),
            dict.fromkeys((1, 0, -1), names[0]),
        ),
    ):
        drawn = Drawn(svg)
        width, height = map(float, drawn.all("svg")[0]["viewbox"].split()[2:])
        for given in drawn.all("polyline"):
            for pair in given["points"].split():
                x, y = map(float, pair.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height
        assert all(0 <= float(given["x"]) <= width and 0 <= float(given["y"]) <= height for given in drawn.all("text"))
        assert any("<b>&'" in words for words, _ in drawn.labels)


def test_room_on_the_left_grows_with_the_labels():
    def edge(label):
        axes = Axes((0, 1), (0, 1), y_ticks={0.0: label})
        axes.draw([0], [0], Look())
        drawn = Drawn(figure("name", "what", [axes], 100))
        return float(drawn.all("polyline")[0]["points"].split(",")[0])

    assert edge("twelve chars") - edge("six ch") == pytest.approx(28, abs=4)
    assert edge("病理") == pytest.approx(edge("four"), abs=0.1)
    assert math.isclose(edge(""), 8, abs_tol=0.1)
