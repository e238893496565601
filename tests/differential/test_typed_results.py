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
---
class T(TypedTensorDict):
    a: torch.Tensor
t = T(a=torch.ones(4), batch_size=[4])
{n: type(f()).__name__ for n, f in dict(flatten_keys=t.flatten_keys, clone=t.clone, select=lambda: t.select("a"), exclude=lambda: t.exclude("a"), empty=t.empty, to=lambda: t.to("cpu"), view=lambda: t.view(2,2), unsq=lambda: t.unsqueeze(0), add=lambda: t+1, index=lambda: t[:2], to_td=t.to_tensordict, det=t.detach, data=lambda: t.data, contiguous=t.contiguous, double=t.double, apply=lambda: t.apply(lambda x: x), named_apply=lambda: t.named_apply(lambda n, x: x), unflat=t.unflatten_keys, sum=lambda: t.sum(0), zeros=lambda: t.new_zeros(3), lock=t.lock_, expand=lambda: t.expand(2,4), gather=lambda: t.gather(0, torch.tensor([0])), unbind=lambda: t.unbind(0)[0], split=lambda: t.split(2)[0], chunk=lambda: t.chunk(2)[0], replace=lambda: t.replace(a=torch.ones(4)), rename=lambda: t.rename_key_("a","c")).items()}
---
@tensorclass
class C:
    a: torch.Tensor
    b: torch.Tensor
t = C(a=torch.ones(4), b=torch.zeros(4), batch_size=[4])
[r is t for r in (t.lock_(), t.unlock_(), t.apply_(lambda x: x+1), t.zero_(), t.add_(1), t.update({"a": torch.ones(4)}), t.set("a", torch.ones(4)), t.fill_("a", 1), t.requires_grad_(False), t.detach_(), t.set_("a", torch.ones(4)), t.auto_batch_size_(), t.to("cpu"), t.contiguous(), t.view(4), t.reshape(4), t.permute(0), t.squeeze(), t.update_({"a": torch.ones(4)}), t.cpu())]
""")
def test_identity(source: str) -> None:
    check(source)
