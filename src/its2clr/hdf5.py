"""HDF5 files that are read: only what lies in the file itself.

HDF5 can take the values of a dataset from other files: from any file as raw bytes (external storage), and from other
HDF5 files (external links, virtual datasets). A file of someone else could so bring what lies on this machine into a
cohort. No program whose files are read here writes such datasets, so they are refused, whoever made the file.

A text of variable length is stored as its length and its place. HDF5 takes memory for the length, which may be 4 GB
in a damaged file of a few kB, before it looks at the place. And it walks without end through a heap of texts in which
a free piece has no length. It shows neither, so headers and heaps are read here too.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import unpack_from

import h5py

from its2clr.errors import InputError
from its2clr.wording import readable_size

_BUILT_IN_FILTERS = 256
"""Numbers of HDF5's own filters are below; others are found by number in libraries that are then loaded."""
_LARGEST_UNCHECKED = 256 * 2**20
_MOST_COMPRESSED = 50
"""Features and images hardly shrink; a file of 10 MB that unpacks to gigabytes of one value is none of them."""
_ATTRIBUTE, _CONTINUED, _VARIABLE = 0x0C, 0x10, 9
"""Numbers of HDF5's file format: two kinds of messages in a header, and the class of types of variable length."""
_REFERENCE = 16
"""Bytes of the reference to a text: its length (4), the address of its heap (8), its number there (4)."""
_MOST_MESSAGES = 10_000
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
    members = []
    for name in group:
        linked = group.links.get_info(name).type != h5py.h5l.TYPE_HARD
        found = None if linked else h5py.h5o.open(group, name)
        problem = "is a link to another place" if linked else None
        if isinstance(found, h5py.h5d.DatasetID):
            problem = _problem(found)
        if problem:
            raise InputError(f"{path}: {name.decode('utf-8', 'replace')!r} {problem}: {_ADVICE}")
        members.append(found)
    _check_texts(path, [group, *members])


def _problem(found: h5py.h5d.DatasetID) -> str | None:
    """What is wrong with a dataset; by h5py's low-level calls, since tile files are opened very often."""
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


def _check_texts(path: str | Path, members: Sequence[object]) -> None:
    """Refuse texts that are longer than the file: of attributes, and of datasets at the top level."""
    raw = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        size = os.fstat(raw).st_size
        for member in members:
            references = list(_attribute_references(raw, h5py.h5o.get_info(member).addr, size))
            if isinstance(member, h5py.h5d.DatasetID) and _is_variable(member.get_type()):
                references += [os.pread(raw, length, place) for place, length in _stored(member)]
            found = [unpack_from("<IQ", part, place) for part in references for place in range(0, len(part) - 15, 16)]
            if any(length > size for length, _ in found):
                raise InputError(f"{path}: a text in it is longer than the file: it is damaged; copy it again")
            if not all(_has_an_end(raw, heap, size) for heap in {heap for length, heap in found if length}):
                raise InputError(f"{path}: the place of its texts is damaged; copy it again")
    finally:
        os.close(raw)


def _is_variable(kind: h5py.h5t.TypeID) -> bool:
    return isinstance(kind, h5py.h5t.TypeVlenID) or (isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str())


def _stored(dataset: h5py.h5d.DatasetID) -> Iterator[tuple[int, int]]:
    """Place and length of the raw values of a dataset; compressed ones are passed over."""
    settings = dataset.get_create_plist()
    if settings.get_layout() == h5py.h5d.CONTIGUOUS and dataset.get_offset() is not None:
        yield dataset.get_offset(), dataset.get_storage_size()
    elif settings.get_layout() == h5py.h5d.CHUNKED and settings.get_nfilters() == 0:
        for number in range(dataset.get_num_chunks()):
            chunk = dataset.get_chunk_info(number)
            yield chunk.byte_offset, chunk.size


def _has_an_end(raw: int, heap: int, size: int) -> bool:
    """Whether a walk through the pieces of a heap comes to its end, as HDF5 walks; a piece of number 0 is free."""
    start = os.pread(raw, 16, heap) if heap < size else b""
    total = unpack_from("<Q", start, 8)[0] if start[:4] == b"GCOL" else 0
    block = os.pread(raw, min(total, size), heap)
    place = 16
    while place + 16 <= len(block):
        number, length = unpack_from("<H6xQ", block, place)
        step = length if number == 0 else 16 + -(-length // 8) * 8
        if step == 0 or length > size:
            return False
        place += step
    return True


def _attribute_references(raw: int, address: int, size: int) -> Iterator[bytes]:
    """The references of attributes whose values are of variable length, from the header of an object."""
    start = os.pread(raw, 64, address)
    if start[:1] == b"\x01":
        newer, ordered, blocks = False, 0, [(address + 16, unpack_from("<I", start, 8)[0])]
    elif start[:4] == b"OHDR":
        flags = start[5]
        place = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        newer, ordered = True, 2 if flags & 4 else 0
        blocks = [(address + place + width, int.from_bytes(start[place : place + width], "little"))]
    else:
        return
    left = _MOST_MESSAGES
    while blocks and left:
        block = os.pread(raw, min(size, blocks[0][1]), blocks.pop(0)[0])
        if newer and block[:4] == b"OCHK":
            block = block[4:-4]
        place, head = 0, 4 + ordered if newer else 8
        while place + head <= len(block) and left:
            left -= 1
            kind, length = unpack_from("<BH" if newer else "<HH", block, place)
            message = block[place + head : place + head + length]
            place += head + length
            if kind == _CONTINUED and len(message) >= _REFERENCE:
                blocks.append(unpack_from("<QQ", message))
            elif kind == _ATTRIBUTE and len(message) > 9:
                yield _value_of_variable_length(message)


def _value_of_variable_length(message: bytes) -> bytes:
    """The raw value of an attribute; nothing if its length is fixed."""
    version = message[0]
    sizes = unpack_from("<HHH", message, 2)
    name, kind, space = (-(-one // 8) * 8 for one in sizes) if version == 1 else sizes
    start = (9 if version == 3 else 8) + name
    variable = len(message) > start and message[start] & 0x0F == _VARIABLE
    return message[start + kind + space :] if variable else b""
