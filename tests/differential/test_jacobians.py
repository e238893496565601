"""`torch.func.jacrev`, `jacfwd` and `hessian` of functions of TensorDicts."""

from __future__ import annotations

from .programs import check, programs


@programs("""
f = lambda t: TensorDict({"y": t["a"] ** 2}, t.batch_size)
J = torch.func.jacrev(f)(TensorDict(a=torch.arange(3.)))
(J.batch_size, J["y", "a"])
---
f = lambda t: TensorDict({"y": t["a"] ** 2}, t.batch_size)
J = torch.func.jacfwd(f)(TensorDict(a=torch.arange(3.)))
(J.batch_size, J["y", "a"])
---
f = lambda t: TensorDict({"y": t["a"] ** 2}, t.batch_size)
J = torch.func.jacfwd(f)(TensorDict({"a": torch.ones(2, 3)}, [2]))
(J.batch_size, J["y", "a"].shape)
---
f = lambda t: TensorDict({"y": t["a"] ** 2}, t.batch_size)
J = torch.func.jacrev(f)(TensorDict({"a": torch.ones(2, 3)}, [2]))
(J.batch_size, J["y", "a"].shape)
---
f = lambda t: TensorDict({"y": (t["a"] ** 2).sum()}, [])
J = torch.func.hessian(f)(TensorDict(a=torch.arange(3.)))
(J.batch_size, J["y", "a", "a"])
---
f = lambda t: TensorDict({"y": (t["a"] ** 3)}, t.batch_size)
J = torch.func.hessian(f)(TensorDict({"a": torch.ones(2, 3)}, [2]))
(J.batch_size, J["y", "a", "a"].shape)
---
f = lambda t: (t["a"] ** 2).sum()
torch.func.grad(f)(TensorDict(a=torch.arange(3.)))
---
f = lambda t: (t["a"] ** 2)
J = torch.func.jacrev(f)(TensorDict(a=torch.arange(3.)))
(J.batch_size, J["a"])
---
f = lambda t: (t["a"] ** 2)
J = torch.func.jacfwd(f)(TensorDict(a=torch.arange(3.)))
(J.batch_size, J["a"])
---
f = lambda t: (t["a"] ** 2).sum()
J = torch.func.hessian(f)(TensorDict(a=torch.arange(3.)))
(J.batch_size, J["a", "a"])
---
f = lambda x: TensorDict({"y": x ** 2})
J = torch.func.jacrev(f)(torch.arange(3.))
(J.batch_size, J["y"])
---
f = lambda x: TensorDict({"y": x ** 2})
J = torch.func.jacfwd(f)(torch.arange(3.))
(J.batch_size, J["y"])
---
f = lambda x: TensorDict({"y": x ** 2}, [3])
J = torch.func.jacfwd(f)(torch.arange(3.))
(J.batch_size, J["y"])
---
f = lambda x: TensorDict({"y": x ** 2}, [3])
J = torch.func.jacrev(f)(torch.arange(3.))
(J.batch_size, J["y"])
---
f = lambda t: (TensorDict({"y": t["a"] ** 2}, t.batch_size), t["a"])
J, aux = torch.func.jacrev(f, has_aux=True)(TensorDict(a=torch.arange(3.)))
(J.batch_size, J["y", "a"], aux)
---
f = lambda t: (TensorDict({"y": t["a"] ** 2}, t.batch_size), TensorDict({"z": t["a"]}, t.batch_size))
J, aux = torch.func.jacrev(f, has_aux=True)(TensorDict({"a": torch.ones(2, 3)}, [2]))
(J.batch_size, J["y", "a"].shape, aux)
---
f = lambda t: (TensorDict({"y": t["a"] ** 2}, t.batch_size), t["a"])
J, aux = torch.func.jacfwd(f, has_aux=True)(TensorDict(a=torch.arange(3.)))
(J.batch_size, J["y", "a"], aux)
---
f = lambda t, u: TensorDict({"y": t["a"] * u["b"]}, t.batch_size)
J = torch.func.jacrev(f, argnums=(0, 1))(TensorDict(a=torch.arange(3.)), TensorDict(b=torch.arange(3.)))
(type(J).__name__, J)
---
f = lambda t, u: TensorDict({"y": t["a"] * u["b"]}, t.batch_size)
J = torch.func.jacrev(f, argnums=1)(TensorDict(a=torch.arange(3.)), TensorDict(b=torch.arange(3.)))
J["y", "b"]
---
f = lambda t: TensorDict({"y": t["a"] ** 2, "n": {"z": t["n", "b"] * 2}}, t.batch_size)
J = torch.func.jacrev(f)(TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2)}}, [2]))
(J.batch_size, {k: v.shape for k, v in J.items(True, True)})
---
f = lambda t: TensorDict({"y": t["a"] ** 2, "n": {"z": t["n", "b"] * 2}}, t.batch_size)
J = torch.func.jacfwd(f)(TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2)}}, [2]))
(J.batch_size, {k: v.shape for k, v in J.items(True, True)})
""")
def test_derivatives(source: str) -> None:
    check(source)
