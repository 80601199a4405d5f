import pytest
from tests.maps.aligned import CUTTINGS, SHAPES, cut


@pytest.fixture(scope="session", params=CUTTINGS, ids=str)
def cut_slide(request, tmp_path_factory):
    """A slide with known shapes, cut in one of many ways; its predictions are the truth."""
    return cut(tmp_path_factory.mktemp("cut"), request.param, SHAPES)
