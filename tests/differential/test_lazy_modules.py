"""`from_modules` of lazy modules, whose parameters get their shape at the first call. Their values are random."""

from __future__ import annotations

from .programs import check, check_error, programs

START = """
import torch.nn as nn
def several(build=lambda: nn.LazyLinear(4), n=3, **how):
    modules = [build() for _ in range(n)]
    return modules, TensorDict.from_modules(*modules, **how)
def call(module, params, x, dims=(0, None)):
    def run(params, x):
        with params.to_module(module):
            return module(x)
    return torch.vmap(run, dims, randomness="same")(params, x)
def told(params):
    before = params["weight"]
    return [type(params).__name__, list(params.batch_size), params.is_locked, isinstance(before, nn.Parameter),
        nn.parameter.is_lazy(before), before.requires_grad, before.dtype]
"""


@programs("""
modules, params = several()
told(params)
---
told(several(as_module=True)[1])
---
told(several(lock=False)[1])
---
told(several(use_state_dict=True)[1])
---
told(several(lambda: nn.LazyLinear(4, bias=False, dtype=torch.float64))[1])
---
modules, params = several(as_module=True)
before = params["weight"]
out = call(modules[0], params, torch.ones(2, 3))
[out.shape, params["weight"].shape, params["bias"].shape, params["weight"] is before, type(before).__name__,
    [type(p).__name__ for p in params.parameters()]]
---
modules, params = several()
out = call(nn.LazyLinear(4), params, torch.ones(3, 2, 5), (0, 0))
[out.shape, params["weight"].shape, bool(params["weight"].abs().max() > 0), bool(params["weight"].abs().max() < 1)]
---
modules, params = several()
call(modules[0], params, torch.ones(3)).sum().backward()
[params["weight"].grad.shape, params["bias"].grad.tolist()]
---
modules, params = several(lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2)), 2)
[call(modules[1], params, torch.ones(5, 3)).shape, params["0", "weight"].shape, params["2", "weight"].shape]
""")
def test_lazy_modules(source: str) -> None:
    check(START + source)


@programs("""
several(lazy_stack=True)
---
several(lazy_stack=True, as_module=True)
---
modules = [nn.LazyLinear(4), nn.LazyLinear(4)]
modules[0](torch.ones(1, 3))
TensorDict.from_modules(*modules)
---
several()[1].clone()
""")
def test_refused(source: str) -> None:
    check_error(START + source)
