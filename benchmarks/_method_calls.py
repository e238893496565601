"""The calls of `methods.py`, each an expression of `td`, of what `Given` has (`g`), and of `torch`.

`k0` is a leaf of every shape, `n` a nested container of most. A call leaves the container so that it can be made again.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[Any, Any], object]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


READ = lines("""
    td["k0"]
    td["n", "k0"]
    td["n"]
    td.get("k0")
    td.get(("n", "k0"))
    td.get("missing", None)
    td.get(("n", "missing"), None)
    td.get_at("k0", 0)
    td.get_at(("n", "k0"), 0)
    td.get_at("k0", g.rows)
    td.get_item_shape("k0")
    td.entry_class("k0")
    "k0" in td.keys()
    ("n", "k0") in td.keys(True)
    "missing" in td.keys()
    list(td.keys())
    list(td.keys(True))
    list(td.keys(True, True))
    list(td.keys(sort=True))
    list(td.keys(True, True, sort=True))
    list(td.keys(leaves_only=True))
    list(td.values())
    list(td.values(True))
    list(td.values(True, True))
    list(td.items())
    list(td.items(True))
    list(td.items(True, True))
    list(td.items(leaves_only=True))
    len(td.keys())
    td.sorted_keys
    td.is_empty()
    td.is_non_tensor("k0")
    td.non_tensor_items()
""")
FACTS = lines("""
    td.batch_size
    td.shape
    td.ndim
    td.batch_dims
    td.dim()
    td.size()
    td.size(0)
    len(td)
    td.numel()
    td.device
    td.names
    td.depth
    td.is_locked
    td.is_memmap()
    td.is_shared()
    td.is_contiguous()
    td.is_cpu
    td.is_cuda
    td.is_floating_point()
    td.requires_grad
    td.dtype
    td.bytes()
    td.param_count()
    td.data_ptr()
    td.grad
    td.is_consolidated()
    repr(td)
""")
WRITE = lines("""
    td.set("k0", g.like)
    td.set("new", g.x).pop("new")
    td.set(("n", "k0"), td["n", "k0"])
    td.set("k0", g.like, inplace=True)
    td.set_("k0", g.like)
    td.set_(("n", "k0"), g.other["n", "k0"])
    td.set_("n", g.other["n"])
    td.set_at_("k0", g.like[0], 0)
    td.set_at_("k0", g.like[g.rows], g.rows)
    td.__setitem__("k0", g.like)
    td.__setitem__(("n", "k0"), g.other["n", "k0"])
    td.setdefault("k0", g.like)
    td.update(g.other)
    td.update(g.values)
    td.update({"k0": g.like})
    td.update(k0=g.like)
    td.update(g.other, clone=True)
    td.update(g.other, inplace=True)
    td.update(g.other, keys_to_update=["k0"])
    td.update(g.other, keys_to_update=[("n", "k0")])
    td.update_(g.other)
    td.update_(g.values)
    td.update_(g.other, keys_to_update=["k0"])
    td.update_at_(g.row, 0)
    td.update_at_(g.some, g.rows)
    td.update_at_(g.some_values, g.rows)
    td.copy_(g.other)
    td.copy_at_(g.row, 0)
    td.fill_("k0", 1.0)
    td.fill_("n", 1.0)
    td.zero_()
    td.masked_fill_(g.mask, 1.0)
    td.masked_fill(g.mask, 1.0)
    td.set("k0", td.pop("k0"))
    td.set("new", g.x).del_("new")
    td.rename_key_("k0", "new").rename_key_("new", "k0")
    td.rename_key_(("n", "k0"), ("n", "new")).rename_key_(("n", "new"), ("n", "k0"))
    td.set_non_tensor("text", "text")
    td.set("text", "text").pop("text")
    td.replace({"k0": g.like})
    td.replace(k0=g.like)
    td.create_nested("made")
    td.__setitem__(0, g.row)
    td.__setitem__(slice(0, 1), g.part)
    td.__setitem__(g.rows, g.some)
    td.__setitem__(0, g.row_values)
    td.__setitem__(g.rows, g.some_values)
    td.__setitem__(g.numbers, g.some)
    td.__setitem__(g.mask, g.masked)
    td.__setitem__(..., g.other)
    td.__setitem__(slice(None), g.other)
    td.__setitem__((slice(None), 0), g.column)
    td.__setitem__(0, 0.0)
    td.__setitem__(g.rows, 0.0)
    td.__setitem__(g.mask, 0.0)
    td.__setitem__(..., 0.0)
    td.requires_grad_().requires_grad_(False)
    td.detach_()
    td.zero_grad()
    td.load_state_dict(g.state)
""")
INDEX = lines("""
    td[0]
    td[-1]
    td[0:1]
    td[:]
    td[::2]
    td[None]
    td[...]
    td[..., 0]
    td[:, 0]
    td[0, 0]
    td[0:1, None]
    td[[0]]
    td[[[0], [0]]]
    td[range(1)]
    td[g.zero]
    td[g.rows]
    td[g.rows.int()]
    td[g.rows[None]]
    td[g.mask]
    td[g.full]
    td[g.array]
    td[g.mask.tolist()]
    td[True]
    td[g.rows, 0]
    td[:, g.rows]
    td[g.rows, None]
    list(td)
    next(iter(td))
""")
SHAPE = lines("""
    td.view(-1)
    td.view(td.batch_size)
    td.view(1, -1)
    td.reshape(-1)
    td.reshape(1, -1)
    td.flatten()
    td.flatten(0, 0)
    td.unflatten(0, (1, -1))
    td.unsqueeze(0)
    td.unsqueeze(-1)
    td.squeeze()
    td.squeeze(0)
    td.permute(*reversed(range(td.ndim)))
    td.transpose(0, -1)
    td.swapaxes(0, -1)
    td.movedim(0, 0)
    td.movedim(0, -1)
    td.expand(2, *g.batch)
    td.expand_as(g.other)
    td.unbind(0)
    td.unbind(-1)
    td.split(2)
    td.split([1, len(td) - 1])
    td.chunk(2)
    td.tensor_split(2)
    td.narrow(0, 0, 1)
    td.repeat(2, *(1 for _ in g.batch[1:]))
    td.repeat_interleave(2, dim=0)
    td.tile(2)
    td.flip(0)
    td.roll(1, 0)
    td.gather(0, g.wide)
    td.masked_select(g.mask)
    g.m.pad(td, [0, 1] + [0, 0] * (td.ndim - 1))
    td.atleast_2d()
    torch.stack([td, g.other])
    torch.stack([td, g.other], -1)
    torch.stack([td] * 16)
    torch.cat([td, g.other])
    torch.cat([td] * 16)
    g.m.lazy_stack([td, g.other])
    torch.unbind(td, 0)
    torch.split(td, 2)
    torch.squeeze(td)
    torch.unsqueeze(td, 0)
""")
STRUCTURE = lines("""
    td.clone()
    td.clone(False)
    td.copy()
    copy.copy(td)
    copy.deepcopy(td)
    td.empty()
    td.empty(recurse=True)
    td.select("k0")
    td.select(("n", "k0"))
    td.select("k0", "missing", strict=False)
    td.exclude("k0")
    td.exclude(("n", "k0"))
    td.split_keys(["k0"])
    td.flatten_keys(".")
    td.flatten_keys(".").unflatten_keys(".")
    td.to_dict()
    td.to_tensordict()
    td.to_lazystack()
    td.filter_empty_()
    td.filter_non_tensor_data()
    td.apply(lambda x: x)
    td.apply(lambda x: x + 1)
    td.apply(lambda x, y: x + y, g.other)
    td.apply(lambda x: x.sum(), batch_size=[])
    td.apply(lambda x: None)
    td.apply(lambda x: x, filter_empty=True)
    td.apply(lambda x: x * 1.0, inplace=True)
    td.apply_(lambda x: x * 1.0)
    td.named_apply(lambda name, x: x)
    td.named_apply(lambda name, x: x, nested_keys=True)
    td.auto_batch_size_()
    setattr(td, "batch_size", g.batch)
    setattr(g.alone, "batch_size", []) or setattr(g.alone, "batch_size", g.batch)
    setattr(g.alone, "names", g.names)
    setattr(g.alone, "names", None)
    g.alone.refine_names(*g.names)
    g.alone.rename_(*g.names)
    td.rename(*g.names)
    g.alone.lock_().unlock_()
    g.alone.lock_()
    g.alone.unlock_()
    td.clear_device_()
    g.alone.auto_device_()
    torch.utils._pytree.tree_map(lambda x: x, td)
    torch.utils._pytree.tree_leaves(td)
    td.state_dict()
    pickle.loads(pickle.dumps(td))
    td.consolidate()
    td.numpy()
    td.to_namedtuple()
    td.to_struct_array()
    g.m.TensorDict.from_dict(g.values, batch_size=g.batch)
    g.m.TensorDict.from_dict(g.values, auto_batch_size=True)
    g.m.TensorDict(g.values, g.batch)
    g.m.TensorDict(g.values, g.batch, device="cpu")
    g.m.TensorDict(g.entries, g.batch)
""")
MOVE = lines("""
    td.to("cpu")
    td.to(torch.device("cpu"))
    td.to(torch.float64)
    td.to(torch.float32)
    td.to("cpu", torch.float64)
    td.to(g.other)
    td.cpu()
    td.float()
    td.double()
    td.half()
    td.int()
    td.bool()
    td.type(torch.float64)
    td.contiguous()
    td.detach()
    td.data
    torch.zeros_like(td)
    torch.ones_like(td)
    torch.rand_like(td)
    torch.full_like(td, 2.0)
    torch.empty_like(td)
    torch.clone(td)
    td.new_zeros(2)
    td.new_empty(*g.batch)
    td.new_full((2,), 1.0)
""")
MATHS = lines("""
    td + 1
    td + 1.5
    1 + td
    td + g.other
    td - g.other
    -td
    td * 2
    td * g.other
    td / 2
    td / g.other
    td ** 2
    abs(td)
    td == g.other
    td != g.other
    td == 0
    td > 0.5
    td >= g.other
    ~(td > 0.5)
    (td > 0.5) & (td < 2)
    td.add(g.other)
    td.add(1, alpha=2)
    td.add_(1)
    td.add_(g.other).sub_(g.other)
    td.mul_(1)
    td.mul_(g.ones)
    td.div_(1)
    td.abs()
    td.neg()
    td.exp()
    td.sqrt()
    td.log()
    td.sin()
    td.sigmoid()
    td.round()
    td.floor()
    td.sign()
    td.reciprocal()
    td.abs_()
    td.clamp(0, 1)
    td.clamp_min(0.0)
    td.clamp_max_(1.0)
    td.maximum(g.other)
    td.minimum(g.other)
    td.maximum_(g.other)
    td.pow(2)
    td.lerp(g.other, 0.5)
    td.lerp_(g.other, 0.5)
    td.addcmul(g.other, g.other)
    td.addcdiv(g.other, g.other)
    td.addcmul_(g.other, g.other, value=0.0)
    td.isnan()
    td.isfinite()
    td.isreal()
    td.nansum()
    td.nanmean()
    td.sum()
    td.sum(0)
    td.sum(dim=0, keepdim=True)
    td.sum(reduce=True)
    td.sum(dim="feature")
    td.mean()
    td.mean(0)
    td.mean(reduce=True)
    td.std()
    td.std(0)
    td.var()
    td.var(dim=0)
    td.prod()
    td.prod(0)
    td.amax(0)
    td.amin(0)
    td.max()
    td.max(dim=0)
    td.min(dim=0)
    td.cummax(dim=0)
    td.all()
    td.any()
    td.all(dim=0)
    td.any(dim=0)
    (td == g.other).all()
    td.norm()
    td.logsumexp(dim=0)
    td.softmax(dim=0)
    td.quantile(0.5, dim=0)
    td.where(g.full, g.other)
    torch.where(g.full, td, g.other)
    torch.sum(td, dim=0)
    torch.mean(td, dim=0)
    torch.allclose(td, g.other)
    td.logical_and(g.other)
    td.bitwise_and(g.other)
    torch.gather(td, 0, g.wide)
""")
FIELDS = lines("""
    td.k0
    td.n
    td.n.k0
    setattr(td, "k0", g.like)
    setattr(td.n, "k0", td.n.k0)
    td.to_tensordict().batch_size
    g.cls.from_tensordict(td._tensordict)
    g.cls.fields()
    g.m.is_tensorclass(td)
    g.cls(**{f"k{i}": td.get(f"k{i}") for i in range(10)}, n=td.n, p=td.p, batch_size=[8])
    td == td
    td._tensordict
    td.get("n").get("k0")
""")
"""Calls of tensorclasses only."""
ELEMENTS = lines("""
    td.tensordicts
    td.stack_dim
    td.get("k0", as_list=True)
    td.get_nestedtensor("k0")
""")
"""Calls of lazy stacks only."""
WIDE = {
    "td[..., 0]", "td[:, 0]", "td[0, 0]", "td[g.rows, 0]", "td[:, g.rows]",
    "td.__setitem__((slice(None), 0), g.column)",
}  # fmt: skip
"""Calls of containers with two batch dimensions."""
OPEN = {
    'td.rename_key_("k0", "new").rename_key_("new", "k0")', 'td.set_non_tensor("text", "text")',
    'td.create_nested("made")',
}  # fmt: skip
"""Calls that a tensorclass refuses: they would make an entry that is no field."""
CALLS = [*READ, *FACTS, *WRITE, *INDEX, *SHAPE, *STRUCTURE, *MOVE, *MATHS, *FIELDS, *ELEMENTS]
_NAMES = {"torch": torch, "copy": copy, "pickle": pickle}


def compiled(text: str) -> Call:
    """Return a function of its own: Python adapts its bytecode to the types that it sees, those of one package."""
    made: Call = eval(f"lambda td, g: {text}", _NAMES)
    return made
