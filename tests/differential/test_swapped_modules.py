"""`to_module`: what a module registers while it holds the tensors of a TensorDict, and afterwards."""

from __future__ import annotations

from .programs import check, programs

START = """
import torch.nn as nn, copy
m = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
p = TensorDict.from_module(m)
def state(module):
    kinds = [type(module[0].weight).__name__, type(module[1].running_mean).__name__, "weight" in vars(module[0])]
    return [list(dict(module.named_parameters())), list(dict(module.named_buffers())), list(module.state_dict()), kinds]
def within(td, **how):
    with td.to_module(m, **how):
        inside = state(m)
    return inside, state(m), m[0].weight is p["0", "weight"]
def after(td, **how):
    td.to_module(m, **how)
    return state(m)
parameters = p.data.float().apply(lambda x: nn.Parameter(x))
class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = TensorDict.from_module(m, as_module=True)
        self.lin = nn.Linear(1, 1)
"""


@programs("""
after(p.data.detach(), preserve_module_state=False)
---
after(p.data.detach())
---
after(p.data.detach(), preserve_module_state=True)
---
after(p, preserve_module_state=False)
---
after(parameters, preserve_module_state=False)
---
after(parameters, preserve_module_state=True)
---
after(parameters)
---
within(p.data)
---
within(p.data, preserve_module_state=False)
---
within(parameters)
---
p.data.to_module(m, preserve_module_state=False)
after(p, preserve_module_state=False)
---
p.data.to_module(m, preserve_module_state=False)
after(p)
---
p.data.to_module(m, preserve_module_state=False)
after(p.data, preserve_module_state=False)
---
p.data.to_module(m, preserve_module_state=False)
(m(torch.ones(2, 2)).shape, copy.deepcopy(m)(torch.ones(2, 2)).shape, list(TensorDict.from_module(m).keys()))
---
held = Holder()
zeros = TensorDict.from_module(held).data * 0
with zeros.to_module(held):
    inside = bool((held.p == 0).all())
(inside, bool((held.p == 0).all()))
---
held = Holder()
(TensorDict.from_module(held).data * 0).to_module(held, preserve_module_state=False)
bool((held.p == 0).all())
---
pm = TensorDict.from_module(m, as_module=True)
with (pm.data * 0).to_module(pm):
    inside = bool((pm == 0).all())
(inside, bool((pm == 0).all()))
---
rows = p.data.select("0").expand(3).clone()
torch.vmap(lambda q: q.to_module(m, return_swap=False) or m[0](torch.ones(2)))(rows).shape
""")
def test_registered(source: str) -> None:
    check(START + source)
