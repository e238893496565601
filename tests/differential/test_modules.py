"""Modules, TensorDictParams and state dicts: the same programs with the peer and with ours.

Where ours differs on purpose, the case is not here but in tests/modules:

- `to_module` in a `with` gives the module its own parameters back after an exception too, in their old order,
  and a parameter stays the object that it is also when it is frozen and the module's is not (the peer makes
  a new one). Tied parameters stay tied. `inplace=False` works.
- `from_module` locks by default, also as a method, and shows a TensorDictParams in a module as a plain
  TensorDict (the peer gives, and locks, the very one).
  `as_module=True` gives a TensorDictParams also for a module without tensors.
- `from_modules` refuses parameters that are trained in one module and frozen in another (the peer freezes all), and
  what is tied in each module is one parameter of the ensemble (the peer unties it).
- A `swap_dest` that is locked is refused before the module is changed (the peer changes it, then raises).
- A TensorDictParams made with `lock=True` is locked; in-place maths on it works; `state_dict`s of a module
  around it load although there is a value that is no tensor, and tell what lacks; `torch.load(weights_only=True)`
  reads one; copies keep what is tied, an optimizer that is copied along with it goes on with it, and
  a buffer stays a buffer when it is cast.
- State dicts: flat ones load without `_metadata`, with nested keys that have dots, and with a key too many or
  too few (`strict=False`); values per row and uneven lazy stacks travel; two entries of one dotted key are an
  error; `assign=True` takes another batch size, and works on a TensorDictParams.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .cases import Cases

case = Cases()


def named(name: str) -> Callable[[Callable[..., object]], None]:
    """Decorate the program of a case."""
    return lambda program: case(name, program)


class Net(nn.Module):
    """Parameters and buffers at several levels, a submodule without any, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.body = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3))
        self.again = self.first
        self.p = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("lost", torch.zeros(1), persistent=False)
        self.register_parameter("none", None)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.T


class Holder(nn.Module):
    """A module with a TensorDictParams."""

    def __init__(self, M: Any, value: float = 1.0) -> None:
        super().__init__()
        self.l = nn.Linear(1, 1)
        self.p = params(M, value)


def params(M: Any, value: float = 1.0, **kwargs: Any) -> Any:
    tree = {"a": torch.full((2,), value), "n": {"b": torch.zeros(3), "i": torch.arange(3)}}
    return M.TensorDictParams(M.td(tree), **kwargs)


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 4)


def parametrized() -> nn.Module:
    torch.manual_seed(0)
    return parametrize.register_parametrization(nn.Linear(3, 3), "weight", Symmetric())


NETS = {"linear": linear, "net": Net, "parametrized": parametrized, "no tensors": nn.ReLU}

# -- out of modules ----------------------------------------------------------------------------
for name, build in NETS.items():
    case(f"from_module {name}", lambda M, b=build: M.TensorDict.from_module(b(), lock=False))
    case(f"from_module lock {name}", lambda M, b=build: M.TensorDict.from_module(b(), lock=True))
    case(f"from_module state dict {name}", lambda M, b=build: M.from_module(b(), use_state_dict=True))
    case(f"from_module empty {name}", lambda M, b=build: M.TensorDict.from_module(b(), lock=False, filter_empty=False))
    if name != "no tensors":
        case(f"from_module as_module {name}", lambda M, b=build: M.from_module(b(), as_module=True, lock=False))


@named("from_module gives the module's own")
def _(M: Any) -> object:
    net = Net()
    td = M.from_module(net)
    same = td["first", "weight"] is net.first.weight and td["body", "1", "running_mean"] is net.body[1].running_mean
    kept = M.from_module(net, use_state_dict=True)["p"].data_ptr() == net.p.data_ptr()
    return same, kept, td["again", "weight"] is td["first", "weight"]


@named("from_module names of parameters and buffers")
def _(M: Any) -> object:
    p = M.from_module(Net(), as_module=True)
    return [n for n, _ in p.named_parameters()], [n for n, _ in p.named_buffers()], p.is_locked


def several(M: Any, build: Any = linear, **kwargs: Any) -> Any:
    return M.TensorDict.from_modules(build(0), build(1), **kwargs)


def norm(seed: int) -> nn.Module:
    return nn.BatchNorm1d(2)


case("from_modules", several)
case("from_modules not locked", lambda M: several(M, lock=False))
case("from_modules with buffers", lambda M: several(M, norm))
case("from_modules as_module", lambda M: several(M, norm, as_module=True))
case("from_modules use_state_dict", lambda M: several(M, use_state_dict=True))
case("from_modules lazy", lambda M: (lambda td: (td[1], td["weight"], td.is_locked))(several(M, lazy_stack=True)))
case("from_modules frozen", lambda M: several(M, lambda seed: linear(seed).requires_grad_(False)))
case("from_modules none", lambda M: M.TensorDict.from_modules())
case("from_modules of one", lambda M: M.from_modules(linear()))
case("from_modules other shapes", lambda M: M.from_modules(linear(), nn.Linear(3, 5)))
case("from_modules other keys", lambda M: M.from_modules(linear(), nn.Linear(3, 4, bias=False)))
case("from_modules lazy as_module", lambda M: several(M, lazy_stack=True, as_module=True))
case("from_modules free function", lambda M: M.from_modules(linear(0), linear(1)))


@named("from_modules expand_identical")
def _(M: Any) -> object:
    shared = linear()
    nets = [nn.ModuleDict({"a": shared, "b": linear(i)}) for i in range(2)]
    td = M.TensorDict.from_modules(*nets, expand_identical=True)
    return {str(k): (v.stride(), v.is_leaf, v.requires_grad, type(v).__name__) for k, v in td.items(True, True)}


@named("from_modules classes and gradients")
def _(M: Any) -> object:
    a, b = linear(0), linear(1)
    dense, lazy = M.TensorDict.from_modules(a, b), M.TensorDict.from_modules(a, b, lazy_stack=True)
    (dense["weight"].sum() * 2).backward()
    first = a.weight.grad, dense["weight"].grad
    (lazy["weight"].sum() * 3).backward()
    return first, a.weight.grad, type(dense["weight"]).__name__, lazy["weight"].is_leaf, lazy[0]["bias"] is a.bias


def call(td: Any, net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with td.to_module(net):
        return net(x)


for kind, kwargs in {"dense": {}, "lazy": {"lazy_stack": True}, "as_module": {"as_module": True}}.items():

    @named(f"F3 ensemble under vmap, {kind}")
    def _(M: Any, kwargs: Any = kwargs) -> object:
        a, b = linear(0), linear(1)
        stacked = M.TensorDict.from_modules(a, b, **kwargs)
        net = nn.Linear(3, 4, device="meta")
        out = torch.vmap(lambda td, x: call(td, net, x), (0, None))(stacked, torch.ones(3))
        out.sum().backward()
        return stacked.batch_size, out.detach(), a.weight.grad, net.weight.device


# -- into a module -----------------------------------------------------------------------------
def ones(M: Any) -> Any:
    return M.td({"weight": torch.ones(4, 3), "bias": torch.ones(4)})


@named("to_module and back")
def _(M: Any) -> object:
    net = linear()
    own = net.weight
    old = ones(M).to_module(net)
    now = net(torch.ones(3)).detach(), type(net.weight).__name__, net.weight.requires_grad, old["weight"] is own
    back = old.to_module(net)
    return now, net.weight is own, type(back["weight"]).__name__, old, list(net.state_dict())


@named("to_module with")
def _(M: Any) -> object:
    net = linear()
    own = net.weight
    with ones(M).to_module(net) as swap:
        inside = swap["weight"] is own, net(torch.ones(3)).detach(), [n for n, _ in net.named_parameters()]
    return inside, net.weight is own


@named("to_module of some")
def _(M: Any) -> object:
    net = linear()
    own = net.weight
    old = M.td({"bias": torch.ones(4)}).to_module(net)
    return list(old.keys()), net.weight is own, net.bias.detach()


@named("to_module inplace")
def _(M: Any) -> object:
    net = linear()
    own, before = net.weight, net.weight.detach().clone()
    with M.td({"weight": torch.ones(4, 3, dtype=torch.float64)}).to_module(net, inplace=True) as swap:
        inside = net.weight is own, net.weight.detach().clone(), swap["weight"].equal(before), swap["weight"] is own
    return inside, net.weight is own, net.weight.equal(before)


@named("to_module inplace, other shape")
def _(M: Any) -> object:
    return M.td({"weight": torch.ones(2, 2)}).to_module(linear(), inplace=True)


@named("to_module swap_dest")
def _(M: Any) -> object:
    net, dest = linear(), M.from_module(linear(1), lock=False)
    own = net.weight
    old = ones(M).to_module(net, swap_dest=dest)
    return old is dest, dest["weight"] is own


case("to_module return_swap=False", lambda M: ones(M).to_module(linear(), return_swap=False))
case("to_module unknown key", lambda M: M.td({"zz": torch.ones(1)}).to_module(linear()))
case("to_module unknown submodule", lambda M: M.td({"zz": {"x": torch.ones(1)}}).to_module(linear()))
case("to_module parametrized name", lambda M: M.td({"weight": torch.ones(3, 3)}).to_module(parametrized()))


@named("to_module use_state_dict")
def _(M: Any) -> object:
    net = linear()
    before = net.weight.detach().clone()
    with ones(M).to_module(net, use_state_dict=True):
        inside = net.weight.detach().clone(), type(net.weight).__name__
    return inside, net.weight.equal(before)


def leaf(kind: str) -> torch.Tensor:
    made = torch.ones(4, 3, requires_grad=kind in ("leaf", "computed"))
    return made * 2 if kind == "computed" else nn.Parameter(made) if kind == "parameter" else made


for kind in ("leaf", "computed", "parameter"):
    for preserve in (True, False):

        @named(f"to_module gradients into a {kind}, preserve={preserve}")
        def _(M: Any, kind: str = kind, preserve: bool = preserve) -> object:
            net, value = linear(), leaf(kind)
            with M.td({"weight": value}).to_module(net, preserve_module_state=preserve):
                same = net.weight is value
                (grad,) = torch.autograd.grad(net(torch.ones(3)).sum(), value)
            return same, grad


@named("to_module buffers")
def _(M: Any) -> object:
    net = nn.BatchNorm1d(2)
    own, lent = net.running_mean, M.from_module(nn.BatchNorm1d(2)).data.clone()
    with lent.to_module(net):
        torch.manual_seed(0)
        net(torch.randn(5, 2) + 3)
    return net.running_mean is own, own, lent["running_mean"], lent["num_batches_tracked"], net.num_batches_tracked


@named("to_module parameter into a buffer")
def _(M: Any) -> object:
    net = nn.BatchNorm1d(2)
    with M.td({"running_mean": nn.Parameter(torch.ones(2))}).to_module(net):
        return net.running_mean.requires_grad, sorted(n for n, _ in net.named_parameters()), sorted(net.state_dict())


@named("to_module a submodule that is used twice")
def _(M: Any) -> object:
    net = Net()
    own = net.first.weight
    lent = M.from_module(net).data.clone().apply(lambda t: torch.ones_like(t))
    with lent.to_module(net):
        inside = net.first is net.again, net.again.weight.detach()
    return inside, net.first.weight is own, net.again.weight is own


@named("to_module parametrized")
def _(M: Any) -> object:
    net = parametrized()
    with M.from_module(net).data.clone().zero_().to_module(net):
        inside = net.weight.detach()
    return inside, net.weight.detach()


@named("to_module in forward hooks")
def _(M: Any) -> object:
    net = nn.Sequential(linear())
    own, lent, kept = net[0].weight, M.from_module(nn.Sequential(linear(1))), {}
    net.register_forward_pre_hook(lambda m, args: kept.update(swap=lent.to_module(m)))
    net.register_forward_hook(lambda m, args, out: kept["swap"].to_module(m) and None)
    return net(torch.ones(3)).detach(), net[0].weight is own


@named("to_module a plain attribute, and where there is None")
def _(M: Any) -> object:
    net = nn.Linear(3, 4, bias=False)
    net.mask = torch.ones(2)
    M.td({"mask": torch.zeros(2), "bias": torch.ones(4)}).to_module(net)
    return net.mask, net.bias


# -- TensorDictParams --------------------------------------------------------------------------
CHECKS: dict[str, Any] = {
    "made": lambda M, p: p,
    "classes": lambda M, p: {str(k): type(v).__name__ for k, v in p.items(True)},
    "names": lambda M, p: ([n for n, _ in p.named_parameters()], [n for n, _ in p.named_buffers()]),
    "modules": lambda M, p: [type(m).__name__ for m in p.modules()],
    "state_dict": lambda M, p: (p.state_dict(), dict(p.state_dict()._metadata)),
    "data": lambda M, p: p.data,
    "detach": lambda M, p: p.detach(),
    "apply": lambda M, p: p.apply(lambda t: t),
    "select": lambda M, p: (p.select("a"), p.exclude("a"), p.empty()),
    "maths": lambda M, p: p.select("a") * 2,
    "clone": lambda M, p: (p.clone(), p.clone()["a"] is p["a"], p.clone()["a"].is_leaf),
    "shallow": lambda M, p: (p.copy(), p.copy()["a"] is p["a"], copy.copy(p)["n", "b"] is p["n", "b"]),
    "deepcopy": lambda M, p: (copy.deepcopy(p), copy.deepcopy(p)["a"] is p["a"]),
    "to dtype": lambda M, p: (
        p.exclude(("n", "i")).to(torch.float64),
        M.TensorDictParams(p["n"]).to(torch.float64)["b"],
    ),
    "to meta": lambda M, p: [t.device.type for t in p.to("meta").values(True, True)],
    "double": lambda M, p: (type(p.double()).__name__, p["a"].dtype),
    "to_dict": lambda M, p: p.to_dict(),
    "to_tensordict": lambda M, p: type(p.to_tensordict()).__name__,
    "flatten_keys": lambda M, p: p.flatten_keys("."),
    "stack": lambda M, p: torch.stack([p.select("a"), p.select("a")]),
    "zeros_like": lambda M, p: torch.zeros_like(p),
    "pickle": lambda M, p: pickle.loads(pickle.dumps(p)),
    "attribute": lambda M, p: p.a,
    "set": lambda M, p: (p.set("c", torch.ones(1)), p["c"], [n for n, _ in p.named_parameters()]),
    "setitem": lambda M, p: (p.__setitem__("c", torch.ones(1)), p["c"]),
    "set nested": lambda M, p: (p.set(("n", "c"), torch.ones(1)), p["n", "c"]),
    "update": lambda M, p: (p.update({"a": torch.zeros(2)}), p["a"]),
    "update_": lambda M, p: (p.update_(M.td({"a": torch.zeros(2)})), p["a"]),
    "set_": lambda M, p: (p.set_("a", torch.zeros(2)), p.set_(("n", "b"), torch.ones(3)), p["n", "b"]),
    "set_at_": lambda M, p: (p.set_at_("a", torch.zeros(1), [0]), p["a"]),
    "zero_": lambda M, p: (p.zero_(), p["a"]),
    "fill_": lambda M, p: (p.fill_("a", 7.0), p["a"]),
    "apply_": lambda M, p: (p.apply_(lambda t: t + 1), p["a"]),
    "del": lambda M, p: (p.del_("a"), list(p.keys())),
    "pop": lambda M, p: (p.pop("a"), list(p.keys())),
    "isinstance": lambda M, p: (isinstance(p, nn.Module), isinstance(p, M.base), M.is_tensor_collection(p)),
    "train": lambda M, p: (p.train(False) is p, p.training),
    "call": lambda M, p: p(),
    "bool": lambda M, p: bool(p),
    "share_memory_": lambda M, p: type(p.share_memory_()).__name__,
    "grad": lambda M, p: (p["a"].sum().backward(), p.grad, p.zero_grad() is p, p["a"].grad),
    "requires_grad": lambda M, p: p.requires_grad,
    "repr": lambda M, p: repr(p),
    "vmap": lambda M, p: torch.vmap(lambda x: p["a"] * x)(torch.ones(2)),
    "get_parameter": lambda M, p: p.get_parameter("n.b"),
    "no_convert": lambda M, p: (lambda q: (q, list(q.parameters()), [n for n, _ in q.named_buffers()]))(
        params(M, no_convert=True)
    ),
    "from a dict": lambda M, p: M.TensorDictParams({"a": torch.ones(2)}),
    "from keywords": lambda M, p: M.TensorDictParams(a=torch.ones(2)),
    "empty one": lambda M, p: M.TensorDictParams(),
    "of what": lambda M, p: {
        k: (type(v).__name__, v.requires_grad, v.is_leaf)
        for k, v in M.TensorDictParams(
            M.td(
                {
                    "leaf": torch.ones(2, requires_grad=True),
                    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
                    "buffer": nn.Buffer(torch.ones(2)),
                    "computed": torch.ones(2, requires_grad=True) * 2,
                    "complex": torch.ones(2, dtype=torch.complex64),
                }
            )
        ).items()
    },
    "lazy stack in it": lambda M, p: M.TensorDictParams(M.lazy_stack([M.td({"a": torch.ones(2)})] * 2)),
    "of rows": lambda M, p: (lambda q: (type(q[0]).__name__, q[0]["a"].shape, q.unbind(0)[1], q.view(2, 1)))(
        M.TensorDictParams(M.td({"a": torch.ones(2, 3)}, batch_size=[2]))
    ),
    "in a TensorDict": lambda M, p: type(M.td({"x": p})["x"]).__name__,
}
for name, check in CHECKS.items():
    case(f"params {name}", lambda M, c=check: c(M, params(M)))


@named("params in a module")
def _(M: Any) -> object:
    m = Holder(M)
    before = m.p["a"]
    m.double()
    m.requires_grad_(False)
    return [n for n, _ in m.named_parameters()], list(m.state_dict()), m.p["a"], m.p["a"] is before, m.p["n", "i"]


@named("params in a module, loaded")
def _(M: Any) -> object:
    m = Holder(M, 1.0)
    before = m.p["a"]
    m.load_state_dict(Holder(M, 5.0).state_dict())
    return m.p["a"], m.p["a"] is before


@named("params lent to a module")
def _(M: Any) -> object:
    m = Holder(M)
    own, lent = m.p, M.td({"p": {"n": {"b": torch.ones(3) * 7}}})
    with lent.to_module(m):
        inside = m.p is own, m.p["n", "b"].detach().clone()
    return inside, m.p["n", "b"]


@named("params optimized")
def _(M: Any) -> object:
    p = params(M)
    optimizer = torch.optim.Adam(p.parameters(), lr=0.1)
    (p["a"] ** 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return p["a"], p["a"].grad


@named("params memory is shared with what they are made of")
def _(M: Any) -> object:
    td = M.td({"a": torch.ones(2)})
    p = M.TensorDictParams(td)
    p.data["a"].zero_()
    return td["a"].detach()


# -- state dicts -------------------------------------------------------------------------------
def sample(M: Any, scale: float = 1.0) -> Any:
    inner = M.td({"y": torch.arange(6).reshape(2, 3)}, batch_size=[2, 3])
    below = M.td({"w": torch.ones(2, 3) * scale, "x": inner, "t": "deep"}, batch_size=[2, 3])
    return M.td({"u": torch.full((2,), scale), "v": below, "s": "text"}, batch_size=[2])


def blank(M: Any) -> Any:
    return sample(M, 0.0)


LEGACY = OrderedDict(
    u=torch.ones(2) * 7,
    v=OrderedDict(
        w=torch.ones(2, 3) * 7,
        x=OrderedDict(y=torch.arange(6).reshape(2, 3) * 7, __batch_size=torch.Size([2, 3]), __device=None),
        t="old",
        __batch_size=torch.Size([2, 3]),
        __device=None,
    ),
    s="legacy",
    __batch_size=torch.Size([2]),
    __device=None,
)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def own_notes(state: Any) -> dict[str, Any]:
    """The metadata of one level, but for what no one reads of a value."""

    def of(note: dict[str, Any]) -> dict[str, Any]:
        return {n: dict(sorted(v.items())) if isinstance(v, dict) else v for n, v in note.items() if n != "device"}

    return {k: of(note) for k, note in state._metadata.items()}


STATES: dict[str, Any] = {
    "flat": lambda M: (lambda s: (s, own_notes(s), type(s).__name__))(sample(M).state_dict()),
    "nested": lambda M: (lambda s: (s, own_notes(s), own_notes(s["v"]), type(s["v"]).__name__))(
        sample(M).state_dict(flatten=False)
    ),
    "prefix": lambda M: (lambda s: (s, own_notes(s)))(sample(M).state_dict(prefix="p.")),
    "prefix nested": lambda M: (lambda s: (s, own_notes(s)))(sample(M).state_dict(prefix="p.", flatten=False)),
    "destination": lambda M: (lambda d: (sample(M).state_dict(destination=d) is d, d))(OrderedDict()),
    "keys with dots": lambda M: M.td({"a.b": torch.ones(1)}).load_state_dict(
        M.td({"a.b": torch.zeros(1)}).state_dict()
    ),
    "load flat": lambda M: blank(M).load_state_dict(sample(M).state_dict()),
    "load nested": lambda M: blank(M).load_state_dict(sample(M).state_dict(flatten=False)),
    "load legacy": lambda M: blank(M).load_state_dict(LEGACY),
    "load flat from a file": lambda M: blank(M).load_state_dict(through_a_file(sample(M).state_dict())),
    "load nested from a file": lambda M: blank(M).load_state_dict(through_a_file(sample(M).state_dict(flatten=False))),
    "load nested without metadata": lambda M: blank(M).load_state_dict(dict(sample(M).state_dict(flatten=False))),
    "load from_flatten": lambda M: (
        blank(M).select("u", "v").exclude(("v", "t")).load_state_dict(dict(sample(M).state_dict()), from_flatten=True)
    ),
    "load from_flatten=False": lambda M: blank(M).load_state_dict(dict(sample(M).state_dict()), from_flatten=False),
    "load other dtype": lambda M: M.td({"u": torch.ones(2)}).load_state_dict({"u": torch.tensor([3, 4])}),
    "load other shape": lambda M: M.td({"u": torch.ones(2)}).load_state_dict({"u": torch.ones(3)}),
    "load into nothing": lambda M: M.td().load_state_dict(sample(M).select("u", "v").state_dict()),
    "load a key too many": lambda M: M.td({"u": torch.zeros(2)}).load_state_dict(
        {"u": torch.ones(2), "q": torch.ones(1)}
    ),
    "load a key too few": lambda M: blank(M).load_state_dict({"u": torch.ones(2)}),
    "load a key too many, not strict": lambda M: M.td({"u": torch.zeros(2)}).load_state_dict(
        {"u": torch.ones(2), "q": torch.ones(1)}, strict=False
    ),
    "load a key too few, not strict": lambda M: M.td({"u": torch.zeros(2), "q": torch.zeros(1)}).load_state_dict(
        {"u": torch.ones(2)}, strict=False
    ),
    "load locked, assign": lambda M: blank(M).lock_().load_state_dict(sample(M).state_dict(), assign=True),
    "load params": lambda M: params(M, 0.0).load_state_dict(params(M, 5.0).state_dict()),
    "load params into a TensorDict": lambda M: params(M, 0.0).data.load_state_dict(params(M, 5.0).state_dict()),
    "load a TensorDict into params": lambda M: params(M, 0.0).load_state_dict(params(M, 5.0).data.state_dict()),
    "lazy": lambda M: M.lazy_stack([M.td({"a": torch.ones(2)}), M.td({"a": torch.zeros(2)})]).state_dict(),
    "load lazy": lambda M: M.lazy_stack([M.td({"a": torch.ones(2)}), M.td({"a": torch.zeros(2)})]).load_state_dict(
        {"a": torch.arange(4.0).view(2, 2)}
    )["a"],
    "empty": lambda M: (M.td({"a": torch.ones(1), "n": {}}).state_dict(), M.td().state_dict(flatten=False)),
}
for name, program in STATES.items():
    case(f"state dict {name}", program)


@named("state dict memory and gradients")
def _(M: Any) -> object:
    td = M.td({"a": torch.ones(2, requires_grad=True)})
    plain, kept = td.state_dict()["a"], td.state_dict(keep_vars=True)["a"]
    return plain.requires_grad, plain.data_ptr() == td["a"].data_ptr(), kept is td["a"]


@named("state dict load in place, or assign")
def _(M: Any) -> object:
    td, state = blank(M), sample(M).state_dict()
    place = td["u"].data_ptr()
    td.load_state_dict(state)
    kept = td["u"].data_ptr() == place
    td.load_state_dict(state, assign=True)
    return kept, td["u"] is state["u"], td["v", "w"] is state["v.w"]


# -- gradients ---------------------------------------------------------------------------------
def graded(M: Any) -> Any:
    td = M.td(
        {"a": torch.ones(2, requires_grad=True), "n": {"b": torch.ones(2, requires_grad=True)}, "i": torch.ones(1)}
    )
    (td["a"].sum() * 2).backward()
    return td


GRADIENTS: dict[str, Any] = {
    "grad": lambda M: graded(M).grad,
    "no grad": lambda M: M.td({"a": torch.ones(1)}).grad,
    "zero_grad": lambda M: (lambda td: (td.zero_grad() is td, td["a"].grad, td.grad))(graded(M)),
    "requires_grad": lambda M: (graded(M).requires_grad, graded(M).data.requires_grad, graded(M).detach()),
    "requires_grad_": lambda M: (lambda td: (td.requires_grad_() is td, td))(M.td({"a": torch.ones(1)})),
    "requires_grad_ of integers": lambda M: M.td({"a": torch.arange(2)}).requires_grad_(),
    "requires_grad_ False": lambda M: graded(M).requires_grad_(False),
    "detach_": lambda M: M.td({"a": torch.ones(2, requires_grad=True) * 2}).detach_(),
    "lazy": lambda M: (
        lambda td: (td.requires_grad_(), (td["a"] * 2).sum().backward(), td.grad["a"], td.zero_grad(), td.grad)[1:]
    )(M.lazy_stack([M.td({"a": torch.ones(2)}), M.td({"a": torch.ones(2)})])),
    "func.grad": lambda M: torch.func.grad(lambda td: (td["a"] * 3).sum())(M.td({"a": torch.ones(2)})),
    "func.jacrev": lambda M: torch.func.jacrev(lambda td: td["a"] * 2)(M.td({"a": torch.ones(2)}))["a"],
    "func.grad through to_module": lambda M: torch.func.grad(lambda td: call(td, linear(), torch.ones(3)).sum())(
        M.from_module(linear(), lock=False)
    ),
}
for name, program in GRADIENTS.items():
    case(f"gradients {name}", program)


@case.parametrize
def test_modules(case: Any) -> None:
    case.check()


def test_state_dicts_are_exchanged_with_the_peer() -> None:
    from .oracle import OURS, PEER, differences, outcome

    for giver, taker in ((OURS, PEER), (PEER, OURS)):
        for flatten in (True, False):
            loaded = outcome(
                lambda g=giver, t=taker, f=flatten: blank(t).load_state_dict(sample(g).state_dict(flatten=f))
            )
            assert not list(differences(outcome(lambda g=giver: sample(g)), loaded)), (giver.name, flatten)
