"""What a person gives to be predicted and the model does not take is called what it is."""

from its2clr.predict.inputs import sort_inputs


def test_a_slide_for_a_model_of_features_is_no_damaged_file(tmp_path):
    (tmp_path / "case.svs").write_bytes(b"II*\0")
    found = sort_inputs([tmp_path / "case.svs"], "features")
    assert found.features == []
    assert found.left_out[0].problem.startswith("is a slide or an image, and features are expected (.h5, .hdf5, .pt)")


def test_features_for_a_model_of_slides(tmp_path):
    (tmp_path / "case.h5").write_bytes(b"")
    found = sort_inputs([tmp_path / "case.h5"], "slides")
    assert found.slides == []
    assert found.left_out[0].problem == "holds features, and the model takes slides"
