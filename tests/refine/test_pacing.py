from fractions import Fraction

import pytest

from its2clr.refine.pacing import Pacing


@pytest.mark.parametrize(("initial", "final"), [(0.2, 0.8), (0.5, 0.5), (0.7, 0.2), (1.0, 1.0)])
@pytest.mark.parametrize(("warmup", "epochs"), [(0, 1), (0, 10), (15, 50), (3, 4)])
def test_is_the_line_of_the_paper(initial, final, warmup, epochs):
    pacing = Pacing(initial, final, warmup, epochs)
    for epoch in range(1, epochs + 1):
        if epoch <= warmup:
            expected = initial
        else:
            slope = (Fraction(final) - Fraction(initial)) / (epochs - warmup)
            expected = float(Fraction(initial) + slope * (epoch - warmup))
        assert pacing.ratio(epoch) == pytest.approx(expected, abs=1e-12)
    assert pacing.ratio(epochs) == final
    assert pacing.ratio(epochs + 5) == final


def test_stays_at_the_initial_ratio_when_all_epochs_are_warm_up():
    assert Pacing(0.2, 0.8, 5, 5).ratio(5) == 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.0, 0.5, 1, 2), "initial"), ((0.5, 1.5, 1, 2), "final"), ((0.5, 0.5, 3, 2), "warmup_epochs")],
)
def test_refuses_nonsense(arguments, message):
    with pytest.raises(ValueError, match=message):
        Pacing(*arguments)
