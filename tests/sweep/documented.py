"""Where the page of differences documents what the sweep finds: words of the page, and the calls they describe.

A difference is documented by the first row whose pattern matches its call, its container and each of its lines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "reference" / "differences.md").read_text().lower().split())


class Documented(NamedTuple):
    words: str
    """Of the page, without regard to upper case and line breaks."""
    call: str = ""
    place: str = ""
    line: str = ""
    weak: bool = False
    """Whether a program that should run may need what the peer does: such a call is counted as one that fails."""


STORED = "h5|zarr|window"
KINDS = r"\['kind'\]"

DOCUMENTED = [
    # -- values by themselves
    Documented(
        "give the value itself", "", "value", r"^\['is td'\]|^\['(result|td)'\]\['data'\].*(got None|expected None)"
    ),
    Documented(
        "comes back as it was, batch size and all", r"load_memmap\(p|from_h5\(p", "value", "batch_size|expected .'Size"
    ),
    Documented("`to_h5` and `consolidate(path)` lose", r"to_h5|\.h5|from_consolidated", "value"),
    Documented("does not take one over by `load_memmap_`", r"other.clone\(\).load_memmap_", "value"),
    Documented("is no lazy stack, a `nontensordata` no", r"is_contiguous|isinstance|!= torch|tree_leaves", "stack of"),
    Documented("in the text of a tensordict a value has at most", r"str\(td|format\(td", "value"),
    Documented("`is_meta` is a property", "is_meta", "value"),
    Documented(
        "there `view(5)` of twelve rows is taken",
        "",
        "value",
        r"^ours raises (IndexError|RuntimeError/ValueError)|^expected |\['batch_size'\]",
    ),
    Documented(
        "there, before 0.15, some give a tensordict without its values",
        "",
        "value",
        r"(expected '(TensorDict|LazyStackedTensorDict)', got 'NonTensorStack')"
        r"|: expected None, got {'kind': 'NonTensor|is td|\['result'\]\['(data|keys|names|device|locked|batch_size)'\]",
    ),
    Documented("a value for the whole batch stays one value", "unsqueeze|expand|pad", "value", r"\['result'\]\['"),
    Documented(
        "they have no lock",
        r"is_(locked|memmap|shared|consolidated|floating)|device|numpy\(\)",
        "value",
        "result'\\]: expected|ours raises",
    ),
    Documented("and no maths", "", "value", r"^ours raises (Attribute|Type)Error|^expected "),
    # -- right to differ
    Documented("`nontensordata.where` chooses", r"where\(", "text|value"),
    Documented("`separates` and `split_keys` give", "separates|split_keys", "text"),
    Documented("values have no part in it", r"td (!=|<=|>) (other|torch)|call_on_nested", "text"),
    Documented("have the methods of a tensordict", "data_ptr", "text"),
    Documented("a value for the whole batch stays one value", "", "text", r"\.s'\]\[('kind'|'data'|'batch_size')\]"),
    Documented("texts from hdf5 are `str`", "", "text|h5", r"b'text'"),
    Documented('`update(keys_to_update=[("n", "a")])` brings', r"keys_to_update=\[\"n"),
    Documented("in-place maths on stored data", r"_\(|__i", STORED, r"\['(result|td)'\].*: expected \w+\["),
    Documented("may write nothing", "update_|copy_", "h5|zarr", r"\['(result|td)'\].*: expected"),
    Documented("pieces that do not add up", r"td\[torch.zeros\(5|split\(\[1, 2|flatten\(1, 0|permute\(1, 1", "lazy"),
    Documented("a list, or a dict where an order is asked for, is no operand", r"^td (\||\+|==|<)"),
    # -- keys
    Documented(
        "keys stay in the order", "", "", r"\['keys'\]\[\d+\]|\['result'\](\[\d+\])*: expected ('[in]'|\('n', 'b'|'n')"
    ),
    Documented("an entry that is missing has no `entry_class`", r"entry_class\(\"missing"),
    Documented("a nested tensordict is no leaf", r"is_leaf=lambda c: True|leaves_only=True\)$"),
    Documented(
        "`create_nested` (there since 0.15) and `flatten_keys(inplace=true)` keep",
        r"create_nested\(\(\"n|flatten_keys\(\".\", (inplace=)?True",
    ),
    Documented("is false without `include_nested=true`", r"in td.keys\(\)|td.keys\(\) =="),
    Documented("`separates` and `split_keys` give", "separates"),
    Documented("`non_tensor_items()` of", "non_tensor_items"),
    # -- shapes
    Documented("`-1` in a shape is what it is for tensors", r"unflatten\(0, \[2, -1|permute\((0|)\)"),
    Documented("neither do `[..., 0]`, `roll` and `tile`", r"tile\(|roll\(1\)"),
    Documented("a lazy stack stays one in `expand`", r"expand\(|broadcast_to|narrow", "lazy", "kind"),
    Documented("rows picked one by one across the elements", r"rows, rows|td\[mask|masked_select|\[mask", "lazy"),
    Documented("a lazy stack stays one in `expand`", r"expand|broadcast_to", "lazy"),
    Documented("one stack | a lazy stack of its elements", "h5", "lazy"),
    Documented("give lazy stacks, parameters and objects", "!= torch.ones", "lazy"),
    Documented("a node of `torch.utils._pytree`", "_pytree", "class over lazy"),
    Documented("gives the lazy stack itself", r"td\[\(\)\]", "lazy"),
    Documented("`torch.cat(out=)` fills", r"out=TensorDict|empty\(batch_size|to_padded", "lazy"),
    Documented("some of them drop the names", line=r"\['names'\]"),
    # -- maths
    Documented("over several dimensions reduce all of them", r"prod\(dim=\(0, 1"),
    Documented("`softmax` over the dimension of a lazy stack", "softmax", "lazy"),
    Documented("arithmetic works under `torch.vmap`", "vmap", "lazy"),
    Documented("give lazy stacks, parameters and objects", r"clamp|add\(.*default", "lazy|params"),
    # -- writes
    Documented("methods that write return", r"set_at_|del_|inplace=True|auto_device_|clear_device_"),
    Documented("`lazy[none] = x` is written", r"^td\[(None|0|3)\] =", "lazy"),
    # -- stored
    Documented("`.device` of what was saved to hdf5", "h5|load_", "memmap|loaded|h5|zarr", r"device'\]|tensorclass"),
    Documented(
        "are locked as",
        'make_tensordict|from_consolidated|num_threads=2|get\\("n"\\).unlock_|0\\].is_locked',
        "",
        r"lock|\['keys'\]|tensorclass|result'\]: expected False",
    ),
    Documented("of mapped data with `num_threads=`", "num_threads=2", "memmap|loaded"),
    Documented("exclude(..., inplace=true)` of a locked", r"exclude\(", "memmap|shared|locked"),
    Documented("new entries in the copy that", "flatten_keys", "memmap|shared|locked"),
    Documented("an update with what is no mapping", r"update\((3|\[)", "memmap|shared|locked"),
    Documented("a string with the methods of a `path`", "saved_path"),
    Documented("`td.is_memmap()` of what", "is_memmap", "loaded"),
    Documented("`td.memmap_like()` of memory-mapped data", r"memmap_like\(\)", "memmap|loaded"),
    Documented("map the files that they name", r"memmap_\(|load_|refresh", "memmap|loaded|shared", "shares"),
    Documented("written into the files", r"update\(|assign=True", "loaded", "shares"),
    Documented("the data stays in its files", r"share_memory_|consolidate\(inplace", "loaded|h5|zarr"),
    Documented("load_memmap_` of what a lazy stack saved", "load_memmap_", "lazy"),
    Documented("parts of hdf5: `split`", "split|chunk|filter_non", "h5|zarr|window", KINDS),
    Documented("a second file in a temporary folder", r"clone\(\)$|clone\(rec|clone\(td|copy", STORED, KINDS),
    Documented("`densify`, `replace`, `deepcopy`", "densify|replace|masked_select|where|apply|deepcopy|make_", STORED),
    Documented("td[rows]` of stored data", r"^td\[|repr|str|format|to\(batch_size", STORED),
    Documented("keys stay in the order", r"keys\(True\)", STORED),
    Documented("keys stay in the order", r"keys\(|values\(|items\(|namedtuple|state_dict|tree_leaves", "zarr"),
    Documented("of zarr that is not there", r"^del td\[\"missing|set_\(\"a\", torch.zeros\(4, 3, 5", "zarr"),
    Documented("each access gives a new object", " is td", STORED),
    Documented("keeps the other entries of `n`", r"td\[\"n\"\] = {", STORED),
    Documented("return the nested tensordict", r"set_?\(\(\"n", STORED),
    Documented("without effect, before 0.15 | refused", r"batch_size = \[", STORED),
    Documented("`rename_key_` of a locked hdf5", r"lock_\(\).rename", STORED),
    Documented("what a container does not do at all is in", "rename_key_|requires_grad|vmap|is_contiguous", "window"),
    # -- classes
    Documented('`"x" in obj` is', r" in td$", "class"),
    Documented("`copy.copy` and `copy.deepcopy` copy an object", r"copy\.|is_meta|\"a\": {\"b\"", "class"),
    Documented("refuse other names", r"\"(new|z)\"|\(\"y\"|flatten_keys\(\)\)", "class"),
    Documented("keep the class, of nested objects, too", r"^pad\(", "class"),
    Documented("the class if this process declared it", "h5|consolidate", "class", "tensorclass"),
    Documented("takes the device of `other`", r"squeeze\(td\)", "class", "is td"),
    Documented("objects join with those of their class", r"cat\(|stack\(|load_state_dict\({}", "class"),
    Documented(
        "`set`, `pad` and stored data of a `typedtensordict`", r"set|pad|memmap|h5|stack_tensors", "typed", "kind|is td"
    ),
    Documented("give the object itself or another one", "", "typed", "is td"),
    Documented("create_nested` refuse other names", "create_nested|fromkeys", "typed"),
    # -- parameters
    Documented("there their tensors stay plain", "update|np.ones|flatten_keys", "params"),
    Documented("up to torch", "", "params", r"expected \w+\["),
    Documented("leaves integers buffers", r"td.to\(", "params"),
    Documented("`load_state_dict(assign=true)` takes", "assign=True", "params"),
    Documented("is a node of `torch.utils._pytree`", "_pytree", "params"),
    Documented("`share_memory_()` locks", "share_memory_|is_locked", "params"),
    Documented("`tensordictparams` has `map`", "densify|from_any", "params"),
    # -- on a GPU
    Documented("hdf5 and zarr keep the device of what was saved", "h5|zarr", "cuda", "device|cuda:0"),
    Documented(
        "`from_consolidated(path)` maps the file, on the cpu",
        "from_consolidated",
        "cuda",
        r"device|cuda:0|\['keys'\]|tensorclass",
    ),
    Documented("leaves on a gpu stay there without `device=`", r"consolidate\(\)", "no device on cuda", "cuda:0"),
    Documented("`share_memory_()` of a lazy stack on a gpu", "share_memory_", "lazy on cuda", "locked"),
    Documented("`device` is none, and `numpy()` returns", r"format\(td|str\(td", "text on cuda"),
    # -- others
    Documented("takes the device of `other`", r"to\((other|3.5|\))|new_tensor"),
    Documented("a call that is wrong in two ways", line=r"expected raises .* got raises"),
]


def documented(call: str, place: str, lines: list[str]) -> Documented | None:
    """The row that tells a difference, or None."""
    for row in DOCUMENTED:
        if re.search(row.call, call) and re.search(row.place, place) and all(re.search(row.line, x) for x in lines):
            return row
    return None
