"""`update` between batch sizes: refused, or taken over at every level."""

from __future__ import annotations

from .programs import check, programs

START = """
@tensorclass
class T:
    a: torch.Tensor
Z = lambda n: TensorDict({"a": torch.zeros(n)}, [n])
C = lambda n: T(a=torch.zeros(n), batch_size=[n])
L = lambda n: lazy_stack([Z(n), Z(n)], 1)
at = dict(update_batch_size=True)
"""


@programs("""
TensorDict({}, [3]).update(TensorDict({}, [4]))
---
TensorDict({}, [3]).update(TensorDict({}, [4]), **at).batch_size
---
TensorDict({}, [3]).update(Z(4))
---
Z(3).update(Z(4))
---
Z(3).update(Z(4), **at)
---
Z(3).update(TensorDict({}, [4]), **at)
---
TensorDict({}, [3]).update(TensorDict({}, [3, 4])).batch_size
---
TensorDict({}, [3, 4]).update(TensorDict({}, [3])).batch_size
---
td = Z(3)
(td.update(Z(4), **at) is td, td)
---
inner = Z(3)
td = TensorDict({"n": inner}, []).update(TensorDict({"n": Z(4)}, []), **at)
(td["n"] is inner, td)
---
TensorDict({"n": Z(3)}, []).update({"n": Z(4)}, **at)
---
TensorDict({"n": Z(3)}, [3]).update(TensorDict({"n": Z(4)}, [4]), **at)
---
stack = L(3)
(stack.update(L(4), **at) is stack, stack["a"])
---
TensorDict({"l": L(3)}, []).update(TensorDict({"l": L(4)}, []), **at)["l"]["a"]
---
C(3).update(C(4), **at).a
---
C(3).update(C(4))
---
inner = C(3)
td = TensorDict({"t": inner}, []).update(TensorDict({"t": C(4)}, []), **at)
(td["t"] is inner, td["t"].batch_size, td["t"].a)
---
Z(3).update(Z(4), inplace=True, **at)
---
Z(3).update(Z(3), inplace=True, **at)
---
Z(3).update(Z(4), keys_to_update=["a"], **at)
---
Z(3).update(Z(3), keys_to_update=["a"], **at)
---
td = Z(3).lock_()
(M.attempt(lambda: td.update(Z(4), **at)), td)
---
td = TensorDict({"n": Z(3).lock_()}, [])
(M.attempt(lambda: td.update(TensorDict({"n": Z(4)}, []), **at)), td["n"])
---
td = TensorDict({"a": torch.zeros(3), "b": torch.ones(3)}, [3])
(M.attempt(lambda: td.update(Z(4), **at)), td)
---
Z(3).update({"a": torch.zeros(4)}, **at)
---
Z(3).update({}, **at)
---
Z(3).update(Z(4), clone=True, **at)
---
Z(3).update(TensorDict({"a": torch.zeros(3, 4)}, [3, 4]), **at).batch_size
""")
def test_batch_sizes(source: str) -> None:
    check(START + source)
