"""Take data from elsewhere: dataclasses, named tuples, structured arrays, dicts, lists of records; give it back."""

import dataclasses
from collections import namedtuple

import numpy as np
import torch
from tensordict import TensorDict, from_dataclass, is_tensorclass, make_tensordict

Transition = namedtuple("Transition", ["state", "action", "info"])
Info = namedtuple("Info", ["steps", "lives"])


@dataclasses.dataclass
class Config:
    weights: torch.Tensor
    name: str = "base"
    rate: float = 0.1


def show(name, td):
    print(name, type(td).__name__, tuple(td.batch_size), sorted(map(str, td.keys(True, True))))


def main():
    transition = Transition(torch.zeros(4, 3), torch.arange(4), Info(torch.ones(4), torch.full((4,), 3)))
    td = TensorDict.from_namedtuple(transition, auto_batch_size=True)
    show("named tuple", td)
    again = td.to_namedtuple()
    print(again._fields, type(again.info).__name__, again.info.lives.tolist())
    td = TensorDict.from_namedtuple(transition, batch_size=[4], device="cpu")
    print(td.device, td["info"].batch_size, td[2]["info", "steps"].item())

    records = np.array([(1, 2.5, 1), (3, 4.5, 0)], dtype=[("id", "i8"), ("value", "f8"), ("ok", "i8")])
    table = TensorDict.from_struct_array(records, auto_batch_size=True)
    show("structured array", table)
    print(table["id"].dtype, table["value"].tolist(), table["ok"].tolist(), table[1]["id"].item())
    back = table.to_struct_array()
    print(sorted(back.dtype.names), back["value"].tolist(), back.shape)

    config = Config(torch.ones(2), rate=0.5)
    plain = TensorDict.from_dataclass(config)
    print(sorted(plain.keys()), plain["name"], round(float(plain["rate"]), 3))
    typed = from_dataclass(config)
    print(type(typed).__name__, is_tensorclass(typed), typed.name, typed.weights.tolist())
    cls = from_dataclass(Config)
    made = cls(weights=torch.zeros(3, 2), name="other", rate=torch.ones(3), batch_size=[3])
    print(cls.__name__, made.batch_size, made[0].weights.shape, made[1].name, made[2].rate.item())

    mixed = {"a": [1, 2, 3], "b": {"c": np.ones((3, 2)), "d": "text"}, "e": 2.0}
    td = TensorDict.from_any(mixed)
    show("anything", td)
    print(td["a"].tolist(), td["b", "c"].dtype, td["b", "d"], td["e"].shape)
    td = TensorDict.from_dict({"x": np.zeros((3, 4)), "n": {"y": torch.ones(3, 5)}}, auto_batch_size=True)
    print(td.batch_size, td["n"].batch_size, td["x"].dtype)
    td = TensorDict.from_dict({"x": torch.zeros(3, 4), "n": {"y": torch.ones(3, 5)}})
    print(td.batch_size, td.auto_batch_size_(1).batch_size, td["n"].batch_size)
    pair = TensorDict.from_tuple((torch.zeros(2), {"inner": torch.ones(2)}), auto_batch_size=True)
    print(sorted(map(str, pair.keys(True, True))), pair.batch_size)

    rows = TensorDict.from_list([{"id": i, "point": {"x": float(i)}} for i in range(3)])
    print(rows.batch_size, rows["id"].tolist(), rows["point", "x"].tolist())
    tree = [torch.zeros(2), {"k": (torch.ones(2), torch.arange(3))}]
    made = TensorDict.from_pytree(tree)
    print(made["1", "k", "0"].tolist(), made["1", "k", "1"].tolist(), made.to_pytree()[1]["k"][1].tolist())
    print(make_tensordict(a=torch.zeros(2, 3), b=torch.ones(2), auto_batch_size=True).batch_size)

    where = TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(1)}})
    print(where.device, where.auto_device_().device, where["n"].device, where.clear_device_().device)
    arrays = where.numpy()
    print(type(arrays["a"]).__name__, arrays["n"]["b"].tolist())
    keys = TensorDict.fromkeys(["p", ("q", "r")], 7)
    print(keys["p"].item(), keys["q", "r"].item(), keys.batch_size)
    lists = {key: value.tolist() for key, value in table.items()}
    print(sorted(lists.items()))
    typed_rows = [tuple(row[key].item() for key in ("id", "value", "ok")) for row in table]
    print(typed_rows)
