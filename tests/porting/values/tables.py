"""From and to pandas, numpy, structured arrays, dataclasses, namedtuples and plain Python."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from tensordict import TensorDict, from_any, from_dict, from_namedtuple, from_struct_array, from_tuple


@dataclass
class Trial:
    rate: float
    seed: int
    scores: np.ndarray


Point = namedtuple("Point", ["x", "y"])


def main():
    array = np.array([(1, 2.5), (3, 4.5)], dtype=[("id", "i8"), ("value", "f8")])
    td = from_struct_array(array)
    print(td.batch_size, td["id"].dtype, td["value"].tolist())
    back = td.to_struct_array()
    print(back.dtype.names, back["id"].tolist(), back[1]["value"].item())

    numpy = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.arange(2)}, "s": "text"}, [2]).numpy()
    print(type(numpy).__name__, type(numpy["a"]).__name__, numpy["n"]["b"].tolist(), numpy["s"])
    again = TensorDict.from_dict({k: v for k, v in numpy.items() if k != "s"}, batch_size=[2])
    print(again["a"].dtype, again["n"].batch_size, again.batch_size)

    frame = pd.DataFrame({"price": [1.0, 2.0, 3.0], "count": [4, 5, 6]})
    prices = TensorDict({name: torch.from_numpy(column.to_numpy().copy()) for name, column in frame.items()}, [3])
    print(prices["price"].dtype, (prices["price"] * prices["count"]).sum().item())
    summary = pd.DataFrame({k: v.numpy() for k, v in (prices + 1).items()})
    print(summary["price"].tolist(), list(summary.columns))
    groups = prices["count"] % 2
    print({g.item(): prices[groups == g]["price"].mean().item() for g in groups.unique()})

    trial = from_any(Trial(0.5, 3, np.zeros(4)))
    print(trial.rate if hasattr(trial, "rate") else trial["rate"])
    plain = TensorDict.from_any({"a": [1, 2, 3], "b": {"c": (1.0, 2.0)}, "d": "text", "e": None, "f": 3})
    print(
        type(plain).__name__, sorted(plain.keys()), plain["a"].tolist() if hasattr(plain["a"], "tolist") else plain["a"]
    )
    print(plain["d"], int(plain["f"]))

    pair = from_namedtuple(Point(torch.ones(2), {"z": torch.zeros(2)}), auto_batch_size=True)
    print(pair.batch_size, sorted(map(str, pair.keys(True, True))))
    restored = pair.to_namedtuple()
    print(type(restored).__name__, restored.x.tolist())
    tupled = from_tuple((torch.ones(3), torch.zeros(3, 2)), auto_batch_size=True)
    print(sorted(tupled.keys()), tupled.batch_size)

    nested = from_dict(
        {"x": np.arange(6).reshape(3, 2), "deep": {"y": np.ones(3, dtype=np.float32)}}, auto_batch_size=True
    )
    print(nested.batch_size, nested["x"].dtype, nested["deep", "y"].dtype)
    as_dict = nested.to_dict()
    print(type(as_dict["deep"]).__name__, type(as_dict["x"]).__name__)
    print(nested.tolist()[0] if isinstance(nested.tolist(), list) else nested.tolist())
    print(nested[0].to_dict()["x"].tolist(), np.asarray(nested["deep", "y"]).sum())
    records = [row.to_dict() for row in nested.unbind(0)]
    print(len(records), records[2]["deep"]["y"].item())
    rebuilt = TensorDict.stack([TensorDict.from_dict(record) for record in records])
    print((rebuilt == nested).all(), rebuilt.batch_size)
