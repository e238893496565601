"""Where the page of differences tells what the sweep finds: words of it, and the calls that they are about.

A difference is told by the first row whose pattern finds its call, on its container, with each of its lines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "reference" / "differences.md").read_text().lower().split())


class Told(NamedTuple):
    words: str
    """Of the page, without regard to upper case and line breaks."""
    call: str = ""
    place: str = ""
    line: str = ""
    weak: bool = False
    """Whether a program that should run may need what the peer does: such a call is counted as one that fails."""


STORED = "h5|zarr|window"
KINDS = r"\['kind'\]"

TOLD = [
    # -- right to differ
    Told("`nontensordata.where` chooses", r"where\(", "text"),
    Told("`separates` and `split_keys` give", "separates|split_keys", "text"),
    Told("values have no part in it", r"td (!=|<=|>) (other|torch)|call_on_nested", "text"),
    Told("have the methods of a tensordict", "data_ptr", "text"),
    Told("a value for the whole batch stays one value", "", "text", r"\.s'\]\[('kind'|'data'|'batch_size')\]"),
    Told("texts from hdf5 are `str`", "", "text|h5", r"b'text'"),
    Told('`update(keys_to_update=[("n", "a")])` brings', r"keys_to_update=\[\"n"),
    Told("in-place maths on stored data", r"_\(|__i", STORED, r"\['(result|td)'\].*: expected \w+\["),
    Told("may write nothing", "update_|copy_", "h5|zarr", r"\['(result|td)'\].*: expected"),
    Told("pieces that do not add up", r"td\[torch.zeros\(5|split\(\[1, 2|flatten\(1, 0|permute\(1, 1", "lazy"),
    Told("a list, or a dict where an order is asked for, is no operand", r"^td (\||\+|==|<)"),
    # -- keys
    Told(
        "keys stay in the order", "", "", r"\['keys'\]\[\d+\]|\['result'\](\[\d+\])*: expected ('[in]'|\('n', 'b'|'n')"
    ),
    Told("an entry that is missing has no `entry_class`", r"entry_class\(\"missing"),
    Told("a nested tensordict is no leaf", r"is_leaf=lambda c: True|leaves_only=True\)$"),
    Told(
        "`create_nested` and `flatten_keys(inplace=true)` keep",
        r"create_nested\(\(\"n|flatten_keys\(\".\", (inplace=)?True",
    ),
    Told("needs `include_nested=true`", r"in td.keys\(\)|td.keys\(\) =="),
    Told("`separates` and `split_keys` give", "separates"),
    Told("`non_tensor_items()` of", "non_tensor_items"),
    # -- shapes
    Told("`-1` in a shape is what it is for tensors", r"unflatten\(0, \[2, -1|permute\((0|)\)"),
    Told("neither do `[..., 0]`, `roll` and `tile`", r"tile\(|roll\(1\)"),
    Told("a lazy stack stays one in `expand`", r"expand\(|broadcast_to|narrow", "lazy", "kind"),
    Told("rows picked one by one across the elements", r"rows, rows|td\[mask|masked_select|\[mask", "lazy"),
    Told("a lazy stack stays one in `expand`", r"expand|broadcast_to", "lazy"),
    Told("one stack | a lazy stack of its elements", "h5", "lazy"),
    Told("give lazy stacks, parameters and objects", "!= torch.ones", "lazy"),
    Told("a node of `torch.utils._pytree`", "_pytree", "class over lazy"),
    Told("gives the lazy stack itself", r"td\[\(\)\]", "lazy"),
    Told("`torch.cat(out=)` fills", r"out=TensorDict|empty\(batch_size|to_padded", "lazy"),
    Told("some of them drop the names", line=r"\['names'\]"),
    # -- maths
    Told("over several dimensions reduce all of them", r"prod\(dim=\(0, 1"),
    Told("`softmax` over the dimension of a lazy stack", "softmax", "lazy"),
    Told("arithmetic works under `torch.vmap`", "vmap", "lazy"),
    Told("give lazy stacks, parameters and objects", r"clamp|add\(.*default", "lazy|params"),
    # -- writes
    Told("methods that write return", r"set_at_|del_|inplace=True|auto_device_|clear_device_"),
    Told("`lazy[none] = x` is written", r"^td\[(None|0|3)\] =", "lazy"),
    # -- stored
    Told("`.device` of what was saved to hdf5", "h5|load_", "memmap|loaded|h5", r"device'\]"),
    Told(
        "are locked as",
        'make_tensordict|from_consolidated|num_threads=2|get\\("n"\\).unlock_|0\\].is_locked',
        "",
        "lock|result'\\]: expected False",
    ),
    Told("of mapped data with `num_threads=`", "num_threads=2", "memmap|loaded"),
    Told("`td.consolidate(path).device`", r"consolidate\(", "", r"device'\]"),
    Told("rows after the first of memory-mapped", r"^td\[", "memmap|shared|loaded", "locked"),
    Told("exclude(..., inplace=true)` of a locked", r"exclude\(", "memmap|shared|locked"),
    Told("new entries in the copy that", "flatten_keys", "memmap|shared|locked"),
    Told("an update with what is no mapping", r"update\((3|\[)", "memmap|shared|locked"),
    Told("a string with the methods of a `path`", "saved_path"),
    Told("`td.is_memmap()` of what", "is_memmap", "loaded"),
    Told("`td.memmap_like()` of memory-mapped data", r"memmap_like\(\)", "memmap|loaded"),
    Told("map the files that they name", r"memmap_\(|load_|refresh", "memmap|loaded|shared", "shares"),
    Told("written into the files", r"update\(|assign=True", "loaded", "shares"),
    Told("the data stays in its files", r"share_memory_|consolidate\(inplace", "loaded|h5|zarr"),
    Told("load_memmap_` of what a lazy stack saved", "load_memmap_", "lazy"),
    Told("parts of hdf5: `split`", "split|chunk|filter_non", "h5|zarr|window", KINDS),
    Told("a second file in a temporary folder", r"clone\(\)$|clone\(rec|copy", STORED, KINDS),
    Told("`densify`, `replace`, `deepcopy`", "densify|replace|masked_select|where|apply|deepcopy|make_", STORED),
    Told("td[rows]` of stored data", r"^td\[|repr|str|format|to\(batch_size", STORED),
    Told("keys stay in the order", r"keys\(True\)", STORED),
    Told("each access gives a new object", " is td", STORED),
    Told("keeps the other entries of `n`", r"td\[\"n\"\] = {", STORED),
    Told("return the nested tensordict", r"set_?\(\(\"n", STORED),
    Told("without effect | refused", r"batch_size = \[", STORED),
    Told("`rename_key_` of a locked hdf5", r"lock_\(\).rename", STORED),
    Told("what a container does not do at all is in", "rename_key_|requires_grad|vmap|is_contiguous", "window"),
    # -- classes
    Told('`"x" in obj` is', r" in td$", "class"),
    Told("`copy.copy` and `copy.deepcopy` copy an object", r"copy\.|is_meta|\"a\": {\"b\"", "class"),
    Told("refuse other names", r"\"(new|z)\"|\(\"y\"|flatten_keys\(\)\)", "class"),
    Told("keep the class, of nested objects, too", r"^pad\(", "class"),
    Told("the class if this process declared it", "h5|consolidate", "class", "tensorclass"),
    Told("takes the device of `other`", r"squeeze\(td\)", "class", "is td"),
    Told("objects join with those of their class", r"cat\(|stack\(|load_state_dict\({}", "class"),
    Told(
        "`set`, `pad` and stored data of a `typedtensordict`", r"set|pad|memmap|h5|stack_tensors", "typed", "kind|is td"
    ),
    Told("give the object itself or another one", "", "typed", "is td"),
    Told("create_nested` refuse other names", "create_nested|fromkeys", "typed"),
    # -- parameters
    Told("there their tensors stay plain", "update|np.ones|flatten_keys", "params"),
    Told("up to torch", "", "params", r"expected \w+\["),
    Told("leaves integers buffers", r"td.to\(", "params"),
    Told("`load_state_dict(assign=true)` takes", "assign=True", "params"),
    Told("is a node of `torch.utils._pytree`", "_pytree", "params"),
    Told("`share_memory_()` locks", "share_memory_|is_locked", "params"),
    Told("`tensordictparams` has `map`", "densify|from_any", "params"),
    # -- others
    Told("takes the device of `other`", r"to\((other|3.5|\))|new_tensor"),
    Told("a call that is wrong in two ways", line=r"expected raises .* got raises"),
]


def told(call: str, place: str, lines: list[str]) -> Told | None:
    """The row that tells a difference, or None."""
    for row in TOLD:
        if re.search(row.call, call) and re.search(row.place, place) and all(re.search(row.line, x) for x in lines):
            return row
    return None
