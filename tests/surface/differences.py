"""Where a container refuses what a TensorDict does, and where ours differs from the peer: each with its reason."""

from __future__ import annotations

_STACKED = "a stack has one value per row, and says so"
_WINDOW = "what is written through a window goes to the entry of the store, whose name is another"
_OTHERS = "the rows outside of the window have another shape, and are kept"
_FORGOTTEN = "the window forgets the entry, the store keeps it"
_ROWS = "what stands for a value in new rows, nobody can say"

# kinds -> {expression: why}
REFUSED: dict[str, dict[str, str]] = {
    "lazy 1": {
        'assign(td, "batch_size", [4])': "the stack dimension is the second",
    },
    "window": {
        'td.set("a", other["b"])': _OTHERS,
        **dict.fromkeys(
            [
                'td.rename_key_("a", "x")',
                'td.rename_key_("a", ("n", "a"))',
                'td.flatten_keys(".", inplace=True)',
                'td.flatten_keys(".", inplace=True).unflatten_keys(".", inplace=True)',
            ],
            _WINDOW,
        ),
    },
}

# kinds -> {expression: why}: the outcome is another, rightly.
OTHERWISE: dict[str, dict[str, str]] = {
    "lazy 0, lazy 1": {
        'td.get_non_tensor("s")': _STACKED,
        "td.to_dict()": _STACKED,
        "td.to_dict(convert_tensors=True)": _STACKED,
        "td.numpy()": _STACKED,
        "td.pad([1, 0])": _STACKED,
        "td.apply(lambda x: x.flatten(0, 1), batch_size=[8])": _ROWS,
        "td.apply(lambda x: x[0], batch_size=[2])": _ROWS,
        "M.TensorDict.from_dict(td.to_dict(), auto_batch_size=True)": "a list in a dict has one value per row",
        "td.new_zeros(3, 2)": _ROWS,
        "td.new_zeros((3, 2))": _ROWS,
        "td.new_ones(2)": _ROWS,
        "td.new_full((2,), 1)": _ROWS,
    },
    "lazy 1": {
        "td.tensor_split([1, 2], 1)": "a stack without elements has no keys",
        "td.auto_batch_size_(1)": "the stack dimension is the second",
    },
    "lazy 0, lazy 1, h5, zarr, window, redis, remote": {
        "td.densify()": "what is in memory and dense already is itself"
    },
    "memmap": {
        "td.device": "files are on the CPU",
        'td.to("cpu")': "it is there already",
        "td.cpu()": "it is there already",
    },
}

# kinds -> {expression: why}: done to the container, and not to what it shows.
OF_THE_VIEW: dict[str, dict[str, str]] = {
    "window": dict.fromkeys(
        [
            'td.del_("a")',
            'td.del_(("n", "c"))',
            'delitem(td, "a")',
            'td.pop("a")',
            'td.pop(("n", "c"))',
            "td.popitem()[0]",
            "td.clear()",
            'td.select("a", inplace=True)',
            'td.exclude("a", inplace=True)',
        ],
        _FORGOTTEN,
    ),
}

_KEPT = "a value for the whole batch stays one when the batch is viewed, padded or written to"
_ORDER = "keys stay in the order in which they were set"

# expression -> why ours is another outcome than the peer's
INTENDED: dict[str, str] = {
    "2 ** td": "a power of a number is one",
    "td.lerp(reordered(other), 0.5)": "leaves are matched by key, not by position",
    "td.lerp_(reordered(other), 0.5)": "leaves are matched by key, not by position",
    "td.addcdiv(reordered(other), other)": "leaves are matched by key, not by position",
    "td.prod((0, 1))": "both dimensions are reduced",
    "td.amax((0, 1), keepdim=True)": "both dimensions are reduced",
    "M.TensorDict.lazy_stack([td, td]).contiguous()": _ORDER,
    "td.to_lazystack(0).contiguous()": _ORDER,
    "td.expand(3, 4, 2)": _KEPT,
    "td.expand_as(torch.zeros(3, 4, 2))": _KEPT,
    "td.broadcast_to(3, 4, 2)": "takes the numbers of expand",
    "td.unsqueeze(0)": _KEPT,
    "td.unsqueeze(-1)": _KEPT,
    "td[0, 0].atleast_1d()": _KEPT,
    "td[0].atleast_2d()": _KEPT,
    "td.atleast_3d()": _KEPT,
    "td.pad([1, 0])": _KEPT,
    "td.roll(1)": "the batch is rolled as if it were flat; features stay with their row",
    "td.tile(2)": "batch dimensions repeat; features never do",
    "setitem(td, 2, 0)": _KEPT,
    'assign(td, "batch_size", [4])': "values have the batch size of the TensorDict that holds them",
    'M.TensorDict.from_struct_array(np.array([(1, 2.0), (3, 4.0)], dtype=[("x", "i8"), ("y", "f4")]))': "it reads it",
    'td.update_at_({"no": 1}, 0)': "a KeyError: there is no such entry",
    'td.update({"a": other["b"], "bad": torch.zeros(3)})': "all or nothing",
    '(lambda flat, layout: layout.unpack(flat))(*td.select("a", ("n", "c")).float().pack())': "tensors come first",
    'td.create_nested(("n", "x"))': "entries beside the new one stay",
    'td.flatten_keys(".", inplace=True)': "entries that are flat already stay",
    'td.flatten_keys(".", inplace=True).unflatten_keys(".", inplace=True)': "entries that are flat already stay",
}
# Those of INTENDED in which the peer does as ours since 0.15.
ADOPTED = {
    "td.lerp(reordered(other), 0.5)",
    "td.lerp_(reordered(other), 0.5)",
    "td.addcdiv(reordered(other), other)",
    "M.TensorDict.lazy_stack([td, td]).contiguous()",
    "td.to_lazystack(0).contiguous()",
    "td.roll(1)",
    "td.tile(2)",
    'M.TensorDict.from_struct_array(np.array([(1, 2.0), (3, 4.0)], dtype=[("x", "i8"), ("y", "f4")]))',
    'td.create_nested(("n", "x"))',
    'td.flatten_keys(".", inplace=True).unflatten_keys(".", inplace=True)',
}


def reason(table: dict[str, dict[str, str]], kind: str, expression: str) -> str | None:
    """Why this container's outcome of an expression may be another, if it may."""
    return next(
        (found[expression] for kinds, found in table.items() if kind in kinds.split(", ") and expression in found), None
    )
