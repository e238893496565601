"""A program as users write it, whom type checkers should not bother: checked and run by `test_typing.py`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tdstore
from tdstore import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, TensorDictParams
from tdstore.errors import StoreExistsError

td = tdstore.TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(3, 2)}}, [3])
TensorDict(a=torch.zeros(3)), TensorDict({}, batch_size=3, device="cpu"), TensorDict()
a: Tensor = td["a"]
c: Tensor = td["b", "c"]
rows: TensorDict = td[0:2]
td[..., 0], td[None], td[torch.tensor([0, 2])], td[td["a"] > 0], td[[0, 1]]
nothing = td.get("x", None)
td["d"] = td["a"] + 1
td["b", "e"] = [1, 2, 3]
td["text"] = NonTensorData("hello", batch_size=[3])
td[0:2] = 0
del td["d"]
assert "a" in td and ("b", "c") in td.keys(True) and len(td) == 3
td.set("a", torch.ones(3)).set_("a", torch.zeros(3)).update({"d": torch.zeros(3)}).rename_key_("d", "f")

for key, value in td.items():
    print(key, value)
for key in sorted(td.keys(include_nested=True, leaves_only=True), key=str):
    print(key)
for row in td:
    print(row["a"])
assert {**td}.keys() == dict(td).keys() == td.to_dict().keys()

size: torch.Size = td.batch_size
td.batch_size = [3]
td.names = ["time"]
moved: TensorDict = td.to("cpu", non_blocking=True).float().clone()
same = (td == td).all()
numbers = 1 - td.select("a") * 2 + td.select("a") ** 2
flat: TensorDict = td.reshape(-1).unsqueeze(0).squeeze(0).flatten_keys(".")
parts: tuple[TensorDict, ...] = td.split(2)
relu = td.select("b").apply(torch.relu).named_apply(lambda name, x: x + 1)
for results in [td.select("a").map_iter(lambda chunk: chunk["a"].sum(), num_workers=0, chunksize=2)]:
    next(results)
    results.close()

with td.unlock_() as unlocked:
    unlocked["new"] = torch.zeros(3)
with td.select("b").view(3, 1) as view:
    print(view.shape)


# -- stores ----------------------------------------------------------------------------------
def first(data: TensorDictBase) -> Tensor:
    found: Tensor = data["a"]
    return found[0]


td.select("a", "b").save("steps.h5").close()
with tdstore.open("steps.h5", "r+") as stored:
    stored["a"][0], stored[0:2].to_tensordict(), first(stored)
    stored["g"] = torch.zeros(3)
try:
    tdstore.open(Path("steps.h5"), "x", storage="h5")
except StoreExistsError as error:
    print(error.hint)
td.select("a").memmap("mapped")
loaded: TensorDictBase = tdstore.load("mapped")
again: TensorDictBase = TensorDict.load(Path("mapped"))
tdstore.copy("mapped", "copied.h5")
made = TensorDict.from_schema({"a": ((4,), torch.float32)}, batch_size=[3], storage="memmap", location="made")
print([backend.name for backend in tdstore.backends()])

# -- joined ----------------------------------------------------------------------------------
stacked: TensorDict = tdstore.stack([td, td])
joined: TensorDict = tdstore.cat([td, td], 0)
lazy: LazyStackedTensorDict = tdstore.lazy_stack([td.clone(), td.clone()])
lazy.append(td.clone())
lazy.get("a", as_list=True)


# -- modules ---------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.params = TensorDictParams(tdstore.from_module(self.inner))

    def forward(self, x: Tensor) -> Any:
        with self.params.to_module(self.inner):
            return self.inner(x)


net = Net()
torch.optim.SGD(net.params.parameters(), lr=0.1)
net.params["weight"].sum().backward()
net(torch.zeros(2, 3))
