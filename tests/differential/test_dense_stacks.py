"""`dense_stack_tds`: lazy stacks inside stay lazy."""

from __future__ import annotations

from .programs import check, programs


@programs("""
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
e = TensorDict({"l": lazy_stack([x3, x4])}, [2]); f = TensorDict({"l": lazy_stack([x3.clone(), x4.clone()])}, [2])
r = dense_stack_tds([e, f], 0)
(type(r).__name__, type(r["l"]).__name__, r["l"].stack_dim, r["l"].batch_size, r["l"][:, 0]["q"], r["l"][:, 1]["q"])
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
e = TensorDict({"l": lazy_stack([x3, x4])}, [2]); f = TensorDict({"l": lazy_stack([x3.clone(), x4.clone()])}, [2])
r = dense_stack_tds(lazy_stack([e, f], 0))
(type(r).__name__, type(r["l"]).__name__, r["l"].stack_dim, r["l"].batch_size, r["l"][:, 0]["q"])
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
e = TensorDict({"l": lazy_stack([x3, x4])}, [2]); f = TensorDict({"l": lazy_stack([x3.clone(), x4.clone()])}, [2])
r = dense_stack_tds([e, f], 1)
(type(r).__name__, type(r["l"]).__name__, r["l"].stack_dim, r["l"].batch_size, r["l"][0]["q"])
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
e = TensorDict({"l": lazy_stack([x3, x4])}, [2]); f = TensorDict({"l": lazy_stack([x3.clone(), x4.clone()])}, [2])
r = dense_stack_tds(lazy_stack([e, f], 1))
(type(r).__name__, type(r["l"]).__name__, r["l"].stack_dim, r["l"].batch_size, r["l"][0]["q"])
---
x3 = TensorDict({"q": torch.zeros(3), "only": torch.ones(2)}); x4 = TensorDict({"q": torch.ones(4)})
e = TensorDict({"l": lazy_stack([x3, x4])}, [2]); f = TensorDict({"l": lazy_stack([x3.clone(), x4.clone()])}, [2])
r = dense_stack_tds([e, f], 0)
(r["l"][:, 0]["only"], sorted(r["l"].keys()))
---
x = TensorDict({"q": torch.zeros(3)})
e = TensorDict({"l": lazy_stack([x, x.clone()])}, [2])
r = dense_stack_tds([e, e.clone()], 0)
(type(r["l"]).__name__, r["l"].batch_size, r)
---
x = TensorDict({"q": torch.zeros(3)})
r = dense_stack_tds(lazy_stack([x, x.clone()]))
r
---
x = TensorDict({"q": torch.zeros(3)}, [3])
r = dense_stack_tds(lazy_stack([x, x.clone()], 1))
r
---
x = TensorDict({"q": torch.zeros(3)})
dense_stack_tds([x, x])
---
x = TensorDict({"q": torch.zeros(3)})
dense_stack_tds([x, x], dim=0)
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
dense_stack_tds([x3, x4], 0)
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
dense_stack_tds(lazy_stack([x3, x4]))
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
l = lazy_stack([x3, x4])
r = dense_stack_tds([l, l.clone()], 0)
(type(r).__name__, r.stack_dim, r.batch_size)
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
l = lazy_stack([lazy_stack([x3, x4]), lazy_stack([x3, x4])])
r = dense_stack_tds(l)
(type(r).__name__, r.stack_dim, r.batch_size)
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
e = TensorDict({"n": {"l": lazy_stack([x3, x4])}, "a": torch.zeros(2)}, [2])
r = dense_stack_tds([e, e.clone()], 0)
(type(r["n"]).__name__, type(r["n", "l"]).__name__, r["n", "l"].stack_dim, r["n", "l"].batch_size, r["a"])
---
x3 = TensorDict({"q": torch.zeros(3), "s": "a"}); x4 = TensorDict({"q": torch.ones(4), "s": "b"})
e = TensorDict({"l": lazy_stack([x3, x4]), "t": "z"}, [2])
r = dense_stack_tds([e, e.clone()], 0)
(r["t"], r["l"]["s"])
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
e = TensorDict({"l": lazy_stack([x3, x4])}, [2])
dense_stack_tds([e, TensorDict({"l": lazy_stack([x4, x3])}, [2])], 0)
---
x3 = TensorDict({"q": torch.zeros(3)}); x4 = TensorDict({"q": torch.ones(4)})
e = TensorDict({"l": lazy_stack([x3, x4])}, [2])
dense_stack_tds([e, TensorDict({"l": TensorDict({"q": torch.zeros(2, 3)}, [2])}, [2])], 0)
---
@tensorclass
class C:
    q: torch.Tensor
c = C(q=torch.zeros(3))
r = dense_stack_tds([c, c], 0)
(type(r).__name__, r.batch_size)
""")
def test_dense_stack(source: str) -> None:
    check(source)
