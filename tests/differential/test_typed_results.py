"""Which object a method of a typed class returns: the caller's own, that of out=, or another."""

from __future__ import annotations

from .programs import check, programs


@programs("""
class T(TypedTensorDict):
    a: torch.Tensor
out = TensorDict({}, [4])
T(a=torch.ones(4, 3), batch_size=[4, 3]).logsumexp(dim=1, out=out) is out
---
class T(TypedTensorDict):
    a: torch.Tensor
out = TensorDict({}, [4])
T(a=torch.ones(4, 3), batch_size=[4, 3]).logsumexp(dim=1, out=out)
out
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4, 3), batch_size=[4, 3])
out = TensorDict({"a": torch.zeros(4, 3)}, [4, 3])
r = t.apply(lambda x: x + 1, out=out)
(r is out, out)
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4, 3), batch_size=[4, 3])
out = T(a=torch.zeros(4, 3), batch_size=[4, 3])
r = t.apply(lambda x: x + 1, out=out)
(r is out, type(out).__name__, out["a"])
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4, 3), batch_size=[4, 3])
out = T(a=torch.zeros(4, 3), batch_size=[4, 3])
r = TensorDict(a=torch.ones(4, 3), batch_size=[4, 3]).apply(lambda x: x + 1, out=out)
(r is out, type(out).__name__, out["a"])
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4), batch_size=[4])
out = TensorDict({"a": torch.zeros(4)}, [4])
r = t.where(torch.tensor([True, False, True, False]), t + 1, out=out)
(r is out, out)
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4), batch_size=[4])
out = T(a=torch.ones(4), batch_size=[4])
r = t.where(torch.tensor([True, False, True, False]), t + 1, out=out)
(r is out, out["a"])
---
@tensorclass
class C:
    a: torch.Tensor
t = C(a=torch.ones(4), batch_size=[4])
out = C(a=torch.ones(4), batch_size=[4])
r = t.where(torch.tensor([True, False, True, False]), t + 1, out=out)
(r is out, out.a)
---
@tensorclass
class C:
    a: torch.Tensor
t = C(a=torch.ones(4), batch_size=[4])
out = C(a=torch.ones(4), batch_size=[4])
r = t.apply(lambda x: x + 1, out=out)
(r is out, out.a)
---
@tensorclass
class C:
    a: torch.Tensor
t = C(a=torch.ones(4), batch_size=[4])
out = TensorDict(a=torch.ones(4), batch_size=[4])
r = t.apply(lambda x: x + 1, out=out)
(r is out, out)
---
@tensorclass
class C:
    a: torch.Tensor
t = C(a=torch.ones(4, 3), batch_size=[4, 3])
out = TensorDict(batch_size=[4])
r = t.logsumexp(dim=1, out=out)
(r is out, out)
---
@tensorclass
class C:
    a: torch.Tensor
t = C(a=torch.ones(4, 3), batch_size=[4, 3])
out = C(a=torch.zeros(4), batch_size=[4])
r = t.logsumexp(dim=1, out=out)
(r is out, out.a)
---
@tensorclass
class C:
    a: torch.Tensor
t = C(a=torch.ones(4), batch_size=[4])
out = C(a=torch.zeros(2), batch_size=[2])
r = t.gather(0, torch.tensor([1, 0]), out=out)
(r is out, out.a)
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4), batch_size=[4])
(t.split_keys(["a"], inplace=True)[-1] is t)
---
class T(TypedTensorDict):
    a: torch.Tensor
    b: torch.Tensor
t = T(a=torch.ones(4), b=torch.zeros(4), batch_size=[4])
x, y = t.split_keys(["a"], inplace=True)
(y is t, type(x).__name__, x, y.keys())
---
class T(TypedTensorDict):
    a: torch.Tensor
    b: torch.Tensor
t = T(a=torch.ones(4), b=torch.zeros(4), batch_size=[4])
x, y = t.split_keys(["a"])
(y is t, type(x).__name__, type(y).__name__, x.keys(), y.keys())
---
@tensorclass
class C:
    a: torch.Tensor
    b: torch.Tensor
t = C(a=torch.ones(4), b=torch.zeros(4), batch_size=[4])
x, y = t.split_keys(["a"])
(y is t, type(x).__name__, type(y).__name__)
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4), batch_size=[4])
isinstance(t.to_lazystack(), LazyStackedTensorDict)
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4), batch_size=[4])
l = t.to_lazystack()
(type(l).__name__, l.stack_dim, l["a"], type(l[0]).__name__)
---
@tensorclass
class C:
    a: torch.Tensor
    b: torch.Tensor
t = C(a=torch.ones(4), b=torch.zeros(4), batch_size=[4])
l = t.to_lazystack(0)
(type(l).__name__, isinstance(l, LazyStackedTensorDict), isinstance(l, C))
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4), batch_size=[4])
l = torch.stack([t, t])
(type(l).__name__, isinstance(l, T))
---
@tensorclass
class C:
    a: torch.Tensor
t = C(a=torch.ones(4), batch_size=[4])
l = lazy_stack([t, t])
(type(l).__name__, isinstance(l, LazyStackedTensorDict), type(l[0]).__name__, isinstance(l, C))
""")
def test_identity(source: str) -> None:
    check(source)
