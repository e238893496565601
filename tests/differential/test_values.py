"""apply, arithmetic, comparison and reductions to bool."""

from __future__ import annotations

import operator

import torch

from .cases import Case, Cases
from .structures import t
from .test_access import after, identity

case = Cases()
F = "named"  # floating point only


# --- apply ---
for sample in ("flat", "nested", "named", "deep_batch", "scalar", "text", "empty", "zero_rows"):
    case(f"apply {sample}", lambda M, s=sample: M.sample(s).apply(lambda x: x + x))
    case(f"apply over two {sample}", lambda M, s=sample: M.sample(s).apply(lambda x, y: x + y, M.sample(s)))
    case(f"apply_ {sample}", after(sample, lambda M, td: td.apply_(lambda x: x + x)))
    case(f"apply in place {sample}", after(sample, lambda M, td: td.apply(lambda x: x + x, inplace=True)))
    case(f"apply to None {sample}", lambda M, s=sample: M.sample(s).apply(lambda x: None))
    case(f"named_apply {sample}", lambda M, s=sample: M.sample(s).named_apply(lambda name, x: x + len(name)))
    case(
        f"named_apply nested_keys {sample}",
        lambda M, s=sample: (
            lambda seen: (M.sample(s).named_apply(lambda name, x: seen.append(name), nested_keys=True), seen)
        )([]),
    )
    case(
        f"named_apply names seen {sample}",
        lambda M, s=sample: (lambda seen: (M.sample(s).named_apply(lambda name, x: seen.append(name)), seen))([]),
    )
case("apply drops None", lambda M: M.sample("nested").apply(lambda x: x if x.dtype == torch.float32 else None))
case(
    "apply drops None, keeping empty",
    lambda M: M.sample("nested").apply(lambda x: x if x.dtype == torch.float32 else None, filter_empty=False),
)
case(
    "apply drops None, no empty",
    lambda M: M.sample("nested").apply(lambda x: x if x.dtype == torch.float32 else None, filter_empty=True),
)
case("apply with batch_size", lambda M: M.sample(F).apply(lambda x: x.sum(0), batch_size=[3]))
case("apply with a wrong batch_size", lambda M: M.sample(F).apply(lambda x: x.sum(0), batch_size=[5]))
case("apply that changes the batch", lambda M: M.sample(F).apply(lambda x: x.sum(0)))
case("apply with batch_size and names", lambda M: M.sample(F).apply(lambda x: x[0], batch_size=[3], names=["env"]))
case("apply with device", lambda M: M.sample(F).apply(lambda x: x + 1, device="cpu"))
case(
    "apply with a default",
    lambda M: M.sample(F).apply(lambda x, y: x if y is None else x + y, M.sample(F).exclude("a"), default=None),
)
case("apply over a missing key", lambda M: M.sample(F).apply(lambda x, y: x + y, M.sample(F).exclude("a")))
case("apply in another order", lambda M: M.sample(F).apply(lambda x, y: x - y, M.sample(F).select("n", "a")))
case(
    "apply call_on_nested",
    lambda M: (
        lambda seen: (M.sample("nested").apply(lambda x: seen.append(type(x).__name__), call_on_nested=True), seen)
    )([]),
)
case(
    "apply with out",
    lambda M: (lambda out: (M.sample(F).apply(lambda x: x + 1, out=out) is out, out))(M.sample(F).zero_()),
)
case("apply of locked", lambda M: M.sample(F).lock_().apply(lambda x: x + 1))
case("apply_ keeps tensors", identity("flat", "a", lambda M, td: td.apply_(lambda x: x + 1)))
case("apply_ with a function in place", identity("flat", "a", lambda M, td: td.apply_(lambda x: x.zero_())))
case("apply keeps the source", lambda M: (lambda td: (td.apply(lambda x: x + 1), td))(M.sample(F)))
case("apply that raises", lambda M: M.sample(F).apply(lambda x: 1 / 0))

# --- operators ---
BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
OTHERS = {
    "td": lambda M: M.sample(F) + 1,
    "2": lambda M: 2,
    "0.5": lambda M: 0.5,
    "True": lambda M: True,
    "0-d tensor": lambda M: torch.tensor(3.0),
    "batch tensor": lambda M: t(4, 3) + 1,
    "rows tensor": lambda M: t(4) + 1,
    "wrong tensor": lambda M: t(7),
    "td in another order": lambda M: (M.sample(F) + 1).select("n", "a"),
    "td with fewer keys": lambda M: (M.sample(F) + 1).exclude("a"),
    "td with more keys": lambda M: (M.sample(F) + 1).update({"new": t(4, 3)}),
    "td of another batch": lambda M: M.td({"a": t(2), "n": {"b": t(2)}}, [2]),
    "str": lambda M: "x",
    "None": lambda M: None,
    "list": lambda M: [1],
    "dict": lambda M: {"a": 1},
}
for symbol, op in BINARY.items():
    for name, other in OTHERS.items():
        case(f"td {symbol} {name}", lambda M, op=op, other=other: op(M.sample(F), other(M)))
        if name in ("2", "0.5", "0-d tensor", "batch tensor", "str"):
            case(f"{name} {symbol} td", lambda M, op=op, other=other: op(other(M), M.sample(F) + 1))
for symbol, op in {
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "/=": operator.itruediv,
    "**=": operator.ipow,
}.items():
    for name, other in OTHERS.items():
        case(f"td {symbol} {name}", after(F, lambda M, td, op=op, other=other: op(td, other(M)) is td))
    case(f"td {symbol} on locked", after(F, lambda M, td, op=op: op(td.lock_(), 2) is td))
    case(f"td {symbol} keeps tensors", identity(F, "a", lambda M, td, op=op: op(td, 2)))
for symbol, op in {"&": operator.and_, "|": operator.or_, "^": operator.xor}.items():
    case(f"mask {symbol} mask", lambda M, op=op: op(M.sample(F) > 3, M.sample(F) < 9))
    case(f"mask {symbol} True", lambda M, op=op: op(M.sample(F) > 3, True))
    case(f"floats {symbol} floats", lambda M, op=op: op(M.sample(F), M.sample(F)))
case("-td", lambda M: -M.sample(F))
case("abs(td)", lambda M: abs(-M.sample(F)))
case("~mask", lambda M: ~(M.sample(F) > 3))
case("~floats", lambda M: ~M.sample(F))
case("td @ td", lambda M: M.sample(F) @ M.sample(F))
case("ints + 1", lambda M: M.td({"a": t(3, dtype=torch.int64), "b": t(3, dtype=torch.uint8)}, [3]) + 1)
case("ints + 0.5", lambda M: M.td({"a": t(3, dtype=torch.int64)}, [3]) + 0.5)
case("ints / 2", lambda M: M.td({"a": t(3, dtype=torch.int64)}, [3]) / 2)
case("nested + 1 with bool", lambda M: M.sample("nested") + 1)
case("nested - 1 with bool", lambda M: M.sample("nested") - 1)
case("text + 1", lambda M: M.sample("text") + 1)
case("text == text", lambda M: M.sample("text") == M.sample("text"))
case("text * text", lambda M: M.sample("text") * M.sample("text"))
case("scalar batch + tensor", lambda M: M.td({"a": t(3)}) + t(3))
case("named + named keeps names", lambda M: (M.sample(F) + M.sample(F)).names)
case("empty + 1", lambda M: M.sample("empty") + 1)
case("nested == nested", lambda M: M.sample("nested") == M.sample("nested"))
case("deep_batch + deep_batch", lambda M: M.sample("deep_batch") + M.sample("deep_batch"))
case("deep_batch * tensor", lambda M: M.sample("deep_batch") * t(4))
case("parameters + 1", lambda M: M.td({"w": torch.nn.Parameter(t(3))}, [3]) + 1)
case("td + td of another dtype", lambda M: M.sample(F) + M.sample(F).to(torch.float16))
for name in ("add", "sub", "mul", "div", "pow"):
    case(f"td.{name}(2)", lambda M, n=name: getattr(M.sample(F), n)(2))
    case(f"td.{name}_(2)", after(F, lambda M, td, n=name: getattr(td, n + "_")(2) is td))
case("add alpha", lambda M: M.sample(F).add(M.sample(F), alpha=2))
case("sub alpha", lambda M: M.sample(F).sub(M.sample(F), alpha=2))
case("add intersection", lambda M: M.sample(F).add(M.sample(F).exclude("a"), default="intersection"))
case("add default tensor", lambda M: M.sample(F).add(M.sample(F).exclude("a"), default=torch.tensor(5.0)))

# --- all, any ---
for sample in ("flat", "nested", "named", "cube", "scalar", "empty", "deep_batch", "text"):
    for name in ("all", "any"):
        case(f"{name} {sample}", lambda M, s=sample, n=name: getattr(M.sample(s), n)())
        case(f"{name} {sample} of equality", lambda M, s=sample, n=name: getattr(M.sample(s) == M.sample(s), n)())
        for dim in (0, 1, -1, 7):
            case(f"{name} {sample} dim={dim}", lambda M, s=sample, n=name, d=dim: getattr(M.sample(s), n)(dim=d))

# --- gradients ---
case("detach", lambda M: M.td({"w": torch.nn.Parameter(t(3))}, [3]).detach())
case("data", lambda M: M.td({"w": torch.nn.Parameter(t(3))}, [3]).data)
case("requires_grad_", lambda M: M.sample(F).requires_grad_())
case("clone keeps the graph", lambda M: M.td({"w": torch.nn.Parameter(t(3))}, [3]).clone()["w"].requires_grad)
case("dtype", lambda M: [M.sample(s).dtype for s in ("nested", "flat", "cube")] + [M.td({"a": t(2)}, [2]).dtype])


@case.parametrize
def test_values(case: Case) -> None:
    case.check()
