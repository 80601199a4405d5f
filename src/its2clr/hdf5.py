"""HDF5 files that are read: only what lies in the file itself.

HDF5 can take the values of a dataset from other files: from any file as raw bytes (external storage), and from other
HDF5 files (external links, virtual datasets). A file of someone else could so bring what lies on this machine into a
cohort. No program whose files are read here writes such datasets, so they are refused, whoever made the file.
"""

from pathlib import Path

import h5py

from its2clr.errors import InputError
from its2clr.wording import readable_size

_BUILT_IN_FILTERS = 256
"""Numbers of HDF5's own filters are below; others are found by number in libraries that are then loaded."""
_LARGEST_UNCHECKED = 256 * 2**20
_MOST_COMPRESSED = 50
"""Features and images hardly shrink; a file of 10 MB that unpacks to gigabytes of one value is none of them."""
_ADVICE = "it is not read; write the values into the file itself (h5repack, or h5py)"


def open_hdf5(path: str | Path) -> h5py.File:
    """Open an HDF5 file for reading and check everything at its top level, which is all that is ever read.

    Raises:
        InputError: A name is not a plain member of this file, or a dataset has its values from elsewhere.
        OSError: The file is missing, damaged, or no HDF5 file.
    """
    file = h5py.File(path, "r")
    try:
        _check(path, file.id)
    except BaseException:
        file.close()
        raise
    return file


def _check(path: str | Path, group: h5py.h5g.GroupID) -> None:
    for name in group:
        if problem := _problem(group, name):
            raise InputError(f"{path}: {name.decode('utf-8', 'replace')!r} {problem}: {_ADVICE}")


def _problem(group: h5py.h5g.GroupID, name: bytes) -> str | None:  # noqa: PLR0911
    """What is wrong with a member; by h5py's low-level calls, since tile files are opened very often."""
    if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
        return "is a link to another place"
    if not isinstance(found := h5py.h5o.open(group, name), h5py.h5d.DatasetID):
        return None
    settings = found.get_create_plist()
    if settings.get_layout() == h5py.h5d.VIRTUAL:
        return "has its values from other files (a virtual dataset)"
    if settings.get_external_count() > 0:
        return "has its values from other files (external storage)"
    filters = [settings.get_filter(number)[0] for number in range(settings.get_nfilters())]
    if foreign := [number for number in filters if number >= _BUILT_IN_FILTERS and number != h5py.h5z.FILTER_LZF]:
        return f"is compressed by filter {foreign[0]}, which is not part of HDF5"
    declared = found.get_type().get_size() * found.get_space().get_simple_extent_npoints()
    if declared > _LARGEST_UNCHECKED + _MOST_COMPRESSED * found.get_storage_size():
        return f"declares {readable_size(declared)} of values, but holds {readable_size(found.get_storage_size())}"
    return None
