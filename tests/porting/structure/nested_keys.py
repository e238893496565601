"""Everything with keys: nested access, selection, exclusion, splitting, renaming, flattening, updating, iterating."""

from collections.abc import Mapping, MutableMapping

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key, unravel_key_list
from tensordict.base import NO_DEFAULT
from tensordict.utils import is_seq_of_nested_key


def observation() -> TensorDict:
    return TensorDict(
        {
            "pixels": torch.zeros(2, 3),
            "agent": {"pose": torch.ones(2, 6), "joints": {"angle": torch.ones(2, 4), "limit": torch.zeros(2, 4)}},
            "done": torch.tensor([[False], [True]]),
        },
        [2],
    )


def read(td: TensorDictBase, key: NestedKey, default=NO_DEFAULT):
    return td.get(key) if default is NO_DEFAULT else td.get(key, default)


def main():
    td = observation()
    print(sorted(td.keys()), sorted(map(str, td.keys(True))), sorted(map(str, td.keys(True, True))))
    print(read(td, ("agent", "joints", "angle")).shape, read(td, ("agent", "none"), None))
    print(
        td["agent"]["joints"]["limit"].sum().item(), ("agent", "pose") in td.keys(True), "agent" in td, len(td.keys())
    )
    print(isinstance(td, MutableMapping), isinstance(td, Mapping), is_seq_of_nested_key(["a", ("b", "c")]))
    print(unravel_key(("a", ("b", ("c",)))), unravel_key("a"), unravel_key_list(["a", ("b",), ("c", "d")]))

    some = td.select("done", ("agent", "joints", "angle"))
    print(sorted(map(str, some.keys(True, True))), some["agent"].batch_size)
    rest = td.exclude(("agent", "joints"), "pixels")
    print(sorted(map(str, rest.keys(True, True))), td.select("nothing", strict=False).is_empty())
    try:
        td.select("nothing")
    except KeyError:
        print("no such key")
    first, second, last = td.split_keys(["pixels"], [("agent", "pose")])
    print([sorted(map(str, part.keys(True, True))) for part in (first, second, last)])

    flat = td.flatten_keys(".")
    print(sorted(flat.keys()))
    print((flat.unflatten_keys(".") == td).all())
    with td.flatten_keys("/") as inside:
        inside["agent/joints/speed"] = torch.full((2, 4), 0.5)
    print(sorted(td["agent", "joints"].keys()))
    with td.unlock_() as same:
        same["extra"] = torch.zeros(2)
    print(same is td, "extra" in td)

    td.rename_key_("extra", ("agent", "extra")).rename_key_("pixels", "image")
    print(sorted(td.keys()), sorted(td["agent"].keys()))
    print(td.pop("image").shape, td.pop("image", None), td.get("agent").get("pose").shape)
    td.setdefault(("agent", "pose"), torch.zeros(2, 6))
    td.setdefault("step", torch.arange(2))
    print(td["agent", "pose"].sum().item(), td["step"].tolist())

    other = TensorDict({"agent": {"pose": torch.zeros(2, 6), "name": torch.arange(2)}, "new": torch.ones(2)}, [2])
    merged = td.clone().update(other)
    print(merged["agent", "pose"].sum().item(), "joints" in merged["agent"], sorted(merged.keys()))
    limited = td.clone().update(other, keys_to_update=["new"])
    print(
        "new" in limited,
        limited["agent", "pose"].sum().item(),
        td.clone().update({"agent": {"pose": torch.ones(2, 6) * 2}})["agent", "pose"].sum().item(),
    )
    pair = td.clone().update(other.replace({"step": torch.ones(2)}), keys_to_update=("new", "step"))
    print("new" in pair, pair["step"].tolist(), pair["agent", "pose"].sum().item())
    replaced = td.replace({"done": torch.ones(2, 1)})
    print(replaced["done"].dtype, td["done"].dtype)

    shapes = {key if isinstance(key, str) else ".".join(key): tuple(v.shape) for key, v in td.items(True, True)}
    print(dict(sorted(shapes.items())))
    total = 0
    for value in td.values(include_nested=True, leaves_only=True):
        total += value.numel()
    print(total, td.numel(), td.is_empty(), TensorDict().is_empty())
    del td["agent"]["joints"]
    del td["agent", "pose"]
    print(sorted(map(str, td.keys(True))))
    try:
        td["agent", "missing"]
    except KeyError as error:
        print("missing" in str(error))
    sorted_keys = [k for k in td.keys(sort=True)]
    print(sorted_keys, list(TensorDict(b=torch.ones(1), a=torch.zeros(1)).keys()))
