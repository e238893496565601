"""How TensorDicts print, by options; what `load_memmap` takes; and the names of values."""

from __future__ import annotations

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import OptionError

from .programs import check, programs

START = """
import re
@tensorclass
class T:
    b: torch.Tensor
    a: torch.Tensor
    s: str = None
t = T(a=torch.zeros(3), b=torch.zeros(3, 44), batch_size=[3])
td = TensorDict({"a": torch.zeros(3), "b": torch.ones(3, 2), "n": {"c": torch.zeros(3)}}, [3])
def shared(x):
    return re.findall(r"is_shared=([TF]\\w+)", repr(x))
def printed(x, **options):
    with set_printoptions(**options):
        return repr(x)
named = TensorDict({"s": "x", "v": NonTensorStack("a", "b", "c"), "a": torch.zeros(3)}, [3], names=["t"])
plain = TensorDict({"s": "x", "v": NonTensorStack("a", "b", "c"), "a": torch.zeros(3)}, [3])
"""


@programs("""
o = set_printoptions(show_is_shared=False)
o.set()
inside = repr(td)
o.__exit__(None, None, None)
(inside, repr(td), {k: v for k, v in get_printoptions().items() if k not in ("compact", "html")})
---
o = set_printoptions(show_dtype=False)
with o:
    inside = repr(td)
(inside, repr(td))
---
[printed(td, sort_keys=key) for key in (len, lambda s: -len(s), lambda s: -ord(s[0]), None, False, "alphabetical")]
---
[printed(t, sort_keys=key) for key in (lambda s: -ord(s[0]), None, "alphabetical")]
---
printed(lazy_stack([td, td]), sort_keys=lambda s: -ord(s[0]))
---
seen = []
printed(td.exclude("n"), sort_keys=lambda line: seen.append(line) or line)
sorted(seen)
---
printed(t, show_device=False)
---
printed(t, show_is_shared=False)
---
printed(t, show_batch_size=False)
---
printed(t, verbose=False)
""")
def test_options(source: str) -> None:
    check(START + source)


@programs("""
shared(td.memmap(tmp))
---
shared(td.memmap_(tmp))
---
shared(td.memmap())
---
shared(td.memmap_())
---
shared(td.memmap_()[0])
---
shared(td.memmap_().view(3, 1))
---
shared(lazy_stack([td, td.clone()]).memmap_())
---
shared(t.memmap_())
---
td.memmap(tmp)
shared(TensorDict.load_memmap(tmp))
---
shared(td.share_memory_())
---
MemoryMappedTensor.zeros(3).is_shared()
---
MemoryMappedTensor.from_tensor(torch.zeros(3), filename=tmp + "/x").is_shared()
---
shared(TensorDict(a=MemoryMappedTensor.zeros(3)))
""")
def test_a_mapped_tensor_without_a_name_is_not_shared(source: str) -> None:
    check(START + source)


@programs("""
[x for key in "sv" for x in named.get(key).names]
---
plain.names = ["q"]
[plain.get(key).names for key in "sv"]
---
plain.lock_()
plain.names = ["q"]
plain.get("s").names
---
two = TensorDict({"s": "x", "a": torch.zeros(3, 2)}, [3, 2], names=["t", "u"])
(two.get("s").names, two[0].get("s").names)
---
nested = TensorDict({"n": {"s": "x"}}, [3], names=["t"])
nested.get(("n", "s")).names
---
NonTensorData("a", batch_size=[3], names=["u"]).names
""")
def test_names_of_values(source: str) -> None:
    check(START + source)


@pytest.mark.parametrize("wrong", [1, 0, "yes"])
def test_allow_pickle_is_a_bool(wrong: object, tmp_path: object) -> None:
    check(f"TensorDict(a=1).memmap(tmp)\nTensorDict.load_memmap(tmp, allow_pickle={wrong!r})")
    TensorDict(a=torch.zeros(2)).memmap(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="allow_pickle"):
        TensorDict.load(tmp_path, allow_pickle=wrong)
