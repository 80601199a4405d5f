import io

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, JPEGBaseline8Bit, SecondaryCaptureImageStorage, generate_uid

from its2clr.cohort import Cohort, decode, pack_images, read_manifest, read_tiles, tile_path
from its2clr.cohort.image_files import ImageProblem, prepare_image


def write_dicom(path, pixels, meaning, *, bits=None, frames=1, syntax=ExplicitVRLittleEndian, data=None):
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = syntax, SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = FileDataset(path, {}, file_meta=meta, preamble=bytes(128))
    dataset.SOPClassUID, dataset.SOPInstanceUID = SecondaryCaptureImageStorage, meta.MediaStorageSOPInstanceUID
    dataset.PhotometricInterpretation = meaning
    dataset.Rows, dataset.Columns = pixels.shape[-3:-1] if meaning in {"RGB", "YBR_FULL_422"} else pixels.shape[-2:]
    dataset.SamplesPerPixel = 3 if meaning in {"RGB", "YBR_FULL_422"} else 1
    if dataset.SamplesPerPixel == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = pixels.dtype.itemsize * 8
    dataset.BitsStored = bits or dataset.BitsAllocated
    dataset.HighBit, dataset.PixelRepresentation = dataset.BitsStored - 1, int(pixels.dtype.kind == "i")
    if frames > 1:
        dataset.NumberOfFrames = frames
    dataset.PixelData = data or pixels.tobytes()
    dataset.save_as(path, enforce_file_format=True)
    return path


def prepared(path, size=16):
    return decode(prepare_image(path, tile_size=size, encoding="png"))


def noise(*shape, high=256, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, high, shape).astype(dtype)


def test_colour_and_grey(tmp_path):
    colour, grey = noise(16, 16, 3), noise(16, 16)
    np.testing.assert_array_equal(prepared(write_dicom(tmp_path / "a.dcm", colour, "RGB")), colour)
    found = prepared(write_dicom(tmp_path / "b.dcm", grey, "MONOCHROME2"))
    np.testing.assert_array_equal(found, np.repeat(grey[..., None], 3, axis=2))
    found = prepared(write_dicom(tmp_path / "c.dcm", grey, "MONOCHROME1"))
    np.testing.assert_array_equal(found, np.repeat(255 - grey[..., None], 3, axis=2))


def test_deep_grey_is_scaled_by_its_stored_bits(tmp_path):
    deep = noise(16, 16, high=4096, dtype=np.uint16)
    found = prepared(write_dicom(tmp_path / "a.dcm", deep, "MONOCHROME2", bits=12))
    np.testing.assert_array_equal(found[..., 0], np.rint(deep.astype(float) * 255 / 4095).astype(np.uint8))


def test_first_of_several_frames(tmp_path):
    frames = noise(3, 16, 16, 3)
    found = prepared(write_dicom(tmp_path / "a.dcm", frames, "RGB", frames=3))
    np.testing.assert_array_equal(found, frames[0])


def test_jpeg_inside(tmp_path):
    smooth = np.asarray(Image.fromarray(noise(4, 4, 3)).resize((16, 16), Image.Resampling.BICUBIC))
    buffer = io.BytesIO()
    Image.fromarray(smooth).save(buffer, "JPEG", quality=95)
    data = pydicom.encaps.encapsulate([buffer.getvalue()])
    path = write_dicom(tmp_path / "a.dcm", smooth, "YBR_FULL_422", syntax=JPEGBaseline8Bit, data=data)
    expected = np.asarray(Image.open(buffer)).astype(int)
    assert np.abs(prepared(path).astype(int) - expected).max() <= 2


def test_what_cannot_be_used_is_said(tmp_path):
    signed = write_dicom(tmp_path / "a.dcm", noise(16, 16, dtype=np.int16), "MONOCHROME2")
    with pytest.raises(ImageProblem, match="signed pixels"):
        prepared(signed)
    whole = write_dicom(tmp_path / "b.dcm", noise(16, 16, 3), "RGB").read_bytes()
    (tmp_path / "cut.dcm").write_bytes(whole[:-300])
    with pytest.raises(ImageProblem, match="cannot be decoded"):
        prepared(tmp_path / "cut.dcm")


def test_a_folder_of_dicom_images_becomes_a_bag(tmp_path):
    rows = ["bag_id,path,label,split"]
    for split in ("train", "val", "test"):
        for label in (0, 1):
            folder = tmp_path / f"{split}{label}"
            folder.mkdir()
            write_dicom(folder / "1.dcm", noise(30, 20, 3), "RGB")
            Image.fromarray(noise(16, 16, 3)).save(folder / "2.png")
            rows.append(f"{split}{label},{split}{label},{label},{split}")
    (tmp_path / "bags.csv").write_text("\n".join(rows) + "\n")
    pack_images(read_manifest(tmp_path / "bags.csv"), tmp_path / "out", tile_size=16)
    assert Cohort.open(tmp_path / "out").n_instances == 12
    assert read_tiles(tile_path(tmp_path / "out", "val0")).names == ["1.dcm", "2.png"]
