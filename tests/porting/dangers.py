"""What lost or broke data silently, on every kind of container."""

from __future__ import annotations

PLACES = {
    "memory": "td = source",
    "locked": "td = source.lock_()",
    "memmap": "td = source.memmap_(tmp + '/d')",
    "shared": "td = source.share_memory_()",
    "h5": "td = PersistentTensorDict.from_dict(source, filename=tmp + '/f.h5')",
    "lazy": "td = lazy_stack(list(source))",
    "tensorclass": "td = Item(source['a'], source['b'], source['n'], batch_size=[4])",
    "tensorclass over memmap": "td = Item(*source.values(), batch_size=[4]).memmap_(tmp + '/d')",
    "rows": "td = torch.cat([source, source])[:4]",
    "params": "td = TensorDictParams(source)",
}
"""The containers that the dangerous differences are tried on: lines that make `td` of `source`."""
START = """
class Item(TensorClass):
    a: torch.Tensor
    b: torch.Tensor
    n: TensorDict
def entries():
    return {"a": torch.ones(4, 2), "b": torch.ones(4), "n": TensorDict({"a": torch.ones(4), "b": torch.ones(4)}, [4])}
source = TensorDict(entries(), [4])
other = TensorDict(entries(), [4]) * 3
large = {"b": torch.ones(3, 4), "n": TensorDict({"a": torch.ones(3, 4), "b": torch.ones(3, 4)}, [3, 4])}
wide = TensorDict(large, [3, 4])
def shown(x):
    return [x.get(k).detach() for k in ("a", "b", ("n", "a"), ("n", "b"))]
"""
DANGERS: dict[str, str] = {
    "D2": """
import pickle
short = len(pickle.dumps(td[3])) < 20_000
(short, shown(pickle.loads(pickle.dumps(td[1:3]))))
""",
    "D3": "\n---\n".join(
        f"failed = M.attempt(lambda: td.{call} and None)\n(failed, shown(td))"
        for call in (
            "update(other, keys_to_update=('a', 'b'))",
            "update(other, inplace=True, keys_to_update=('a', 'b'))",
            "update_(other, keys_to_update=('a', 'b'))",
            "update_(other, keys_to_update=[('n', 'a')])",
            "update_at_(other[:2], slice(2), keys_to_update=('a', 'b'))",
        )
    ),
    "D4": "\n---\n".join(("td.empty().where(torch.tensor([True, False, True, True]), td)", "shown(td.reshape(2, 2))")),
    "D5": "\n---\n".join(
        f"made = {call}\n(made.batch_size, [list(made.get(k).shape) for k in ('b', ('n', 'a'))])"
        for call in (
            "td.select('b', 'n') + wide",
            "td.select('b', 'n') * wide",
            "td.select('b', 'n') == wide",
            "td.select('b', 'n').maximum(wide)",
        )
    ),
    "D6": """
td.lock_()
failed = M.attempt(lambda: td.update(wide, update_batch_size=True))
(failed, td.batch_size, shown(td))
""",
}
"""What lost or broke data silently, by number: programs over each of `PLACES`."""

BETTER: dict[tuple[str, str, int], str] = {
    ("D3", "h5", 2): "`update_` of the peer's HDF5 writes nothing",
    ("D3", "h5", 3): "`update_` of the peer's HDF5 writes nothing",
    ("D3", "lazy", 4): "`update_at_` with keys writes nothing",
    ("D3", "tensorclass", 4): "`update_at_` with keys writes nothing",
    ("D3", "tensorclass over memmap", 4): "`update_at_` with keys writes nothing",
    ("D3", "params", 1): "`update(inplace=True)` with keys writes nothing",
    ("D4", "lazy", 0): "`where` of a lazy stack without entries gives no entries, and no error",
    ("D5", "lazy", 2): "an AttributeError from inside",
    **{("D5", "h5", i): "`select` is refused" for i in range(4)},
}
"""Where the peer is plainly wrong, by (name, place, program): ours does there what the peer does in memory."""
ADOPTED = [case for case in BETTER if case[0] == "D3" and case[1] != "params"] + [("D5", "lazy", 2)]
"""Those in which the peer does so, too, since 0.15."""
