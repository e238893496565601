"""Copies for other programs: the groups of the header, and its strings as scalar datasets, as h5py shows them."""

from __future__ import annotations

import h5py

from tdstore.header import Header
from tdstore.types import Path
from tdstore_h5.file.names import encode_path
from tdstore_h5.file.tree import VALUE_ATTRIBUTE, Contents


def write_copies(file: h5py.File, contents: Contents, header: Header) -> None:
    """Make the file's groups and string datasets follow the header. tdstore itself reads only the header."""
    wanted = _strings(contents, header)
    in_header = {(*path, key) for path, group in header.groups.items() for key in group.values}
    for path in [*contents.copies, *contents.values]:
        known = path in contents.copies
        if path in (wanted if known else in_header - set(wanted)):
            continue
        del file[encode_path(path) if known else contents.values[path]]
        contents.copies.discard(path)
        contents.values.pop(path, None)
    _drop_empty_groups(file, contents, header)
    for path in header.groups:  # now that no string is in their place
        if path and path not in contents.groups:
            file.require_group(encode_path(path))
            contents.groups[path] = []
    for path, text in wanted.items():
        if path in contents.groups:  # with something in it that is not ours
            continue
        name = encode_path(path)
        if path in contents.copies:
            dataset = file[name]
            if dataset.shape == () and dataset.asstr()[()] == text:
                continue
            del file[name]
        dataset = file.create_dataset(name, (), h5py.string_dtype(), data=text)
        dataset.attrs.create(VALUE_ATTRIBUTE.decode(), 1)
        contents.copies.add(path)


def _strings(contents: Contents, header: Header) -> dict[Path, str]:
    """Return the values of the header that are one string, without those that hold NUL, which ends a string in HDF5."""
    found = {}
    for path, group in header.groups.items():
        for key, record in group.values.items():
            text = record.get("data") if isinstance(record, dict) and len(record) == 1 else None
            place = (*path, key)
            if type(text) is str and "\0" not in text and place not in contents.leaves and place not in header.groups:
                found[place] = text
    return found


def _drop_empty_groups(file: h5py.File, contents: Contents, header: Header) -> None:
    for path in sorted(contents.groups, key=len, reverse=True):
        if path and path not in header.groups:
            name = encode_path(path)
            if not len(file[name]):
                del file[name]
                del contents.groups[path]
