"""More calls: indices, shapes, maths and casts."""

from __future__ import annotations

from .calls import CASTS, PREDICATES, UNARY, lines

BINARY = "add sub mul div pow maximum minimum".split()
REDUCTIONS = "sum mean prod nansum nanmean std var".split()

MORE: dict[str, list[str]] = {
    "index": [
        f"td[{index}]"
        for index in """
0
-1
9
1:3
::2
...
None
:
rows
mask
mask1
[0, 2]
(0, 1)
(0,)
:, 0
..., 0
0, ...
None, 0
:, None
rows, 0
:, rows
rows, rows
mask1, 0
[True, False, True, False]
[[0, 1]]
np.array([0, 1])
np.int64(1)
torch.tensor(1)
torch.tensor([[0, 1], [2, 0]])
range(2)
slice(None)
3, 3
0, 0, 0
torch.zeros(4, 3, dtype=torch.bool)
torch.zeros(5, dtype=torch.bool)
True
1.5
0][1
1:][0
[]
()
torch.tensor([], dtype=torch.long)
:0
5:
-2:
3:1
""".strip().splitlines()
    ],
    "shape": lines("""
td.view(12)
td.view(-1)
td.view(2, 6)
td.view((2, 6))
td.view(torch.Size([12]))
td.view(5)
td.view(size=(12,))
td.view(4, 3)
td.view(torch.int32)
td.view(-1, 1)
td.reshape(12)
td.reshape(-1)
td.reshape(2, -1)
td.reshape((6, 2))
td.reshape(shape=(12,))
td.reshape(5)
td.flatten()
td.flatten(0, 1)
td.flatten(0, -1)
td.flatten(start_dim=0, end_dim=1)
td.flatten(1, 0)
td.flatten(0, 5)
td.unflatten(0, (2, 2))
td.unflatten(0, [2, -1])
td.unflatten(dim=1, unflattened_size=(3, 1))
td.unflatten(0, (5, 5))
td.unsqueeze(0)
td.unsqueeze(-1)
td.unsqueeze(dim=1)
td.unsqueeze(9)
td.squeeze()
td.squeeze(0)
td.unsqueeze(0).squeeze(0)
td.unsqueeze(0).squeeze()
td.unsqueeze(0).squeeze(dim=0)
td.squeeze(9)
td.permute(1, 0)
td.permute((1, 0))
td.permute([1, 0])
td.permute(dims=(1, 0))
td.permute(-1, 0)
td.permute(0)
td.permute()
td.permute(1, 1)
td.transpose(0, 1)
td.transpose(dim0=0, dim1=-1)
td.transpose(0, 5)
td.swapaxes(0, 1)
td.swapdims(0, 1)
td.movedim(0, 1)
td.moveaxis(0, 1)
td.movedim((0, 1), (1, 0))
td.expand(2, 4, 3)
td.expand((2, 4, 3))
td.expand(torch.Size([2, 4, 3]))
td.expand(4, 3)
td.expand(5, 3)
td.expand(2, -1, -1)
td.expand_as(other)
td.expand_as(torch.zeros(2, 4, 3))
td.broadcast_to(2, 4, 3)
td.broadcast_to((2, 4, 3))
td.repeat(2, 1)
td.repeat((2, 1))
td.repeat(2)
td.repeat_interleave(2, dim=0)
td.repeat_interleave(torch.tensor([1, 2, 0, 1]), dim=0)
td.repeat_interleave(2)
td.tile(2, 1)
td.tile((2, 1))
td.tile(2)
td.split(2)
td.split(2, 0)
td.split(3)
td.split([1, 3])
td.split([1, 2])
td.split((1, 2), dim=1)
td.split(split_size=2, dim=0)
td.split(0)
td.split(2, 7)
td.tensor_split(3)
td.tensor_split([1, 2])
td.tensor_split((1, 2), 1)
td.chunk(2)
td.chunk(3, 0)
td.chunk(chunks=2, dim=1)
td.chunk(0)
td.unbind(0)
td.unbind(1)
td.unbind(-1)
td.unbind(dim=0)
td.unbind()
td.unbind(5)
td.narrow(0, 1, 2)
td.narrow(dim=1, start=0, length=2)
td.narrow(0, 3, 3)
td.gather(0, torch.tensor([[0, 1, 2]]))
td.gather(dim=0, index=torch.tensor([[0, 1, 2]]))
td.gather(1, torch.tensor([[0], [1], [2], [0]]))
td.gather(7, torch.tensor([[0]]))
td.masked_select(mask)
td.masked_select(mask1)
td.masked_select(mask=mask)
td.masked_select(torch.zeros(5, dtype=torch.bool))
td.flip(0)
td.flip(0, 1)
td.flip((0, 1))
td.flip(dims=[0])
td.fliplr()
td.flipud()
td.rot90()
td.rot90(1, (0, 1))
td.roll(1)
td.roll(1, 0)
td.roll((1, 1), (0, 1))
td.roll(shifts=1, dims=0)
td.pad([1, 0, 0, 0])
td.pad([1, 0, 0, 2], value=3)
td.pad([1])
pad(td, [1, 0, 0, 1])
pad(td, (0, 1), value=1.0)
td.atleast_1d()
td.atleast_2d()
td.atleast_3d()
td.scatter(0, torch.tensor([[0, 1, 2]]), other[:1])
td.auto_batch_size_()
td.auto_batch_size_(1)
td.auto_batch_size_(batch_dims=1)
td.auto_batch_size_(2, keep_compliant_size=True)
td.flatten_keys()
td.flatten_keys("_")
td.flatten_keys(separator="/")
td.flatten_keys(".", inplace=True)
td.flatten_keys(".", True)
td.flatten_keys(is_leaf=lambda c: True)
td.flatten_keys().unflatten_keys()
td.flatten_keys("_").unflatten_keys("_")
td.flatten_keys(".").unflatten_keys(".", inplace=True)
td.unflatten_keys()
td.select("a")
td.select("a", ("n", "b"))
td.select("n")
td.select("missing")
td.select("missing", strict=False)
td.select("a", inplace=True)
td.select(("n", "m", "c"), inplace=True)
td.select()
td.select("a", as_tensordict=True)
td.select(["a", "i"])
td.exclude("a")
td.exclude(("n", "b"))
td.exclude("n", "i")
td.exclude("missing")
td.exclude("a", inplace=True)
td.exclude()
td.split_keys(["a"])
td.split_keys(["a"], [("n", "b")])
td.split_keys("a")
td.split_keys(["missing"])
td.split_keys(["missing"], strict=False)
td.split_keys(["missing"], default=None)
td.split_keys(["a"], inplace=True)
td.split_keys([("n", "b")], reproduce_struct=True)
td.rename("time", "env")
td.rename("time", None)
td.rename_("time", "env")
td.refine_names("time", ...)
td.refine_names(None, "env")
td.rename(time="t")
with td.flatten_keys() as x: x["new"] = torch.zeros(4, 3)
with td.unsqueeze(0) as x: x["new"] = torch.zeros(1, 4, 3)
with td.view(12) as x: x["new"] = torch.zeros(12)
with td.permute(1, 0) as x: x["new"] = torch.zeros(3, 4)
with td.transpose(0, 1) as x: x["a"] = torch.zeros(3, 4, 2)
with td.unlock_().flatten_keys() as x: x["new"] = torch.zeros(4, 3)
torch.stack([td, td])
torch.stack([td, other], 1)
torch.stack([td, other], dim=-1)
torch.stack([td, other.exclude("a")])
torch.stack([td, other[0]])
torch.stack([td])
torch.cat([td, other])
torch.cat([td, other], 1)
torch.cat([td, other], dim=-1)
torch.cat([td, other.exclude("a")])
torch.cat([td, other], 2)
torch.cat([td, other], out=TensorDict({}, [8, 3]))
torch.stack([td, other], out=TensorDict({}, [2, 4, 3]))
TensorDict.stack([td, other])
TensorDict.cat([td, other], 0)
TensorDict.lazy_stack([td, other])
TensorDict.lazy_stack([td, other], 1)
TensorDict.maybe_dense_stack([td, other])
lazy_stack([td, other.exclude("a")])
maybe_dense_stack = TensorDict.maybe_dense_stack; maybe_dense_stack([td, other.exclude("a")])
dense_stack_tds([td, other])
type(td).stack([td, td])
type(td).lazy_stack([td, td])
torch.unbind(td, 0)
torch.split(td, 2)
torch.chunk(td, 2)
torch.squeeze(td)
torch.unsqueeze(td, 0)
torch.permute(td, (1, 0))
torch.flatten(td, 0, 1)
torch.unflatten(td, 0, (2, 2))
torch.gather(td, 0, torch.tensor([[0, 1, 2]]))
torch.clone(td)
torch.zeros_like(td)
torch.ones_like(td)
torch.empty_like(td).batch_size
torch.full_like(td, 3)
torch.rand_like(td).batch_size
torch.randn_like(td.float()).batch_size
torch.where(mask, td, other)
torch.sum(td)
torch.mean(td.float(), 0)
torch.var(td.float())
torch.std(td.float(), 0)
torch.split(td, [1, 3], 0)
td.cat_tensors("a", "a", out_key="z")
td.stack_tensors("i", ("n", "b"), out_key="z")
td.cat_tensors("i", ("n", "b"), out_key="z", dim=0)
td.stack_tensors("i", ("n", "b"), out_key="z", dim=-1, keep_entries=True)
td.stack_from_tensordict()
td.select("i").stack_from_tensordict()
td.select("i").cat_from_tensordict()
td.cat_from_tensordict()
"""),
    "maths": [
        *(f"td.{name}()" for name in UNARY),
        *(f"td.{name}_()" for name in UNARY),
        *(f"td.{name}()" for name in PREDICATES),
        *(f"td.{name}({by})" for name in BINARY for by in ("2", "other", "torch.ones(4, 3)", "torch.tensor(2.0)")),
        *(f"td.select('a').{name}_({by})" for name in BINARY for by in ("2", "other.select('a')")),
        *(f"td.{name}_({by})" for name in BINARY for by in ("2", "other")),
        *(
            f"td.float().{name}({how})"
            for name in REDUCTIONS
            for how in ("", "0", "dim=(0, 1)", "dim=0, keepdim=True", "dim='feature'", "dim=1", "reduce=True")
        ),
        *lines("""
td.sum(dtype=torch.float64)
td.sum(dim=5)
td.std(correction=0)
td.float().std(dim=0, correction=0)
td.float().var(0, correction=0)
td.float().norm()
td.norm()
td.float().norm(dtype=torch.float64)
td.all()
td.any()
td.all(0)
td.any(dim=1)
td.all(dim=5)
td.select("a").max()
td.select("a").min()
td.select("a").max(0)
td.select("a").min(dim=1)
td.select("a").max(dim=0, keepdim=True)
td.select("a").max(dim=0, return_indices=False)
td.select("a").amax(0)
td.select("a").amin(dim=0)
td.select("a").amax()
td.select("a").cummax(0)
td.select("a").cummin(dim=0)
td.select("a").cummax(dim=0, return_indices=False)
td.select("a").logsumexp(0)
td.select("a").logsumexp(dim=0, keepdim=True)
td.select("a").logsumexp(dim=(0, 1))
td.select("a").softmax(0)
td.select("a").softmax(dim=1, dtype=torch.float64)
td.select("a").quantile(0.5)
td.select("a").quantile(0.5, dim=0)
td.select("a").quantile(0.5, dim=0, keepdim=True)
td.clamp(2, 5)
td.clamp(min=2)
td.clamp(max=5)
td.clamp()
td.clamp(other, other)
td.clamp_max(5)
td.clamp_min(2)
td.clamp_max(other)
td.select("a").clamp_max_(other.select("a"))
td.select("a").clamp_min_(other.select("a"))
td.lerp(other, 0.5)
td.float().lerp(other.float(), 0.5)
td.float().lerp(other.float(), torch.tensor(0.5))
td.float().lerp_(other.float(), weight=0.5)
td.float().addcmul(other.float(), other.float(), value=0.5)
td.float().addcdiv(other.float(), other.float(), value=0.5)
td.float().addcmul_(other.float(), other.float(), value=0.5)
td.select("a").lerp_(other.select("a"), 0.5)
td.select("a").addcmul_(other.select("a"), other.select("a"))
td.select("a").addcdiv_(other.select("a"), other.select("a"), value=2)
td.add(other, alpha=2)
td.add(1, alpha=2)
td.sub(other, alpha=2)
td.add(other.exclude("i"))
td.add(other.exclude("i"), default=0.0)
td.add(other.exclude("i"), default=torch.tensor(0))
td.add(other.exclude("i"), default="intersection")
td.add(other.exclude("i"), default=None)
td.mul(other.exclude("i"), default=None)
td.add_(other.exclude("i"))
td.add_(other, alpha=2)
td.rsub(1)
td.mod(2)
td + 1
1 + td
td - other
2 - td
td * 2
2 * td
td / 2
2 / td
td ** 2
td % 2
-td
abs(td)
~td.bool()
td.bool() & td.bool()
td.bool() | td.bool()
td.bool() ^ td.bool()
td.select("a") + torch.ones(4, 3)
td + "x"
td + None
td + [1]
td + {"a": 1}
td.__iadd__(1)
td.__imul__(2)
td.__isub__(other)
td.select("a").__itruediv__(2)
td.select("a").__ipow__(2)
td.bitwise_and(td)
td.logical_and(td)
td.exp().sum()
td.where(mask, other)
td.where(mask, 0)
td.where(condition=mask, other=other)
td.where(mask, torch.zeros(()))
td.where(mask1, other)
td.where(mask, other, out=td.clone())
td.where(mask, other.exclude("a"), pad=1)
td.where(mask, other.exclude("a"))
td.where(mask, other, pad=3)
td.where(torch.zeros(5, dtype=torch.bool), other)
"""),
    ],
    "casts": [
        *(f"td.{name}()" for name in CASTS),
        *lines("""
td.type(torch.float64)
td.type(dst_type=torch.int8)
td.to("cpu")
td.to(torch.device("cpu"))
td.to(torch.float16)
td.to(dtype=torch.float64)
td.to("cpu", torch.float64)
td.to(device="cpu", dtype=torch.float64)
td.to(torch.zeros(3, dtype=torch.float64))
td.to(other)
td.to(other=other)
td.to(batch_size=torch.Size([4]))
td.to("cpu", non_blocking=True)
td.to("cpu", non_blocking_pin=False)
td.to("meta").device
td.to("meta").get("a").device
td.to("cpu", num_threads=2)
td.to("cpu", inplace=True)
td.to("nonsense")
td.to()
td.to(3.5)
td.to("cuda")
td.cuda()
td.cuda(0)
td.pin_memory()
td.auto_device_()
td.clear_device_()
td.to("cpu").clear_device_()
td.to("cpu").device
td.to("cpu").auto_device_()
td.detach()
td.detach_()
td.data
td.requires_grad_()
td.select("a").requires_grad_()
td.select("a").requires_grad_(False)
td.select("a").requires_grad_(requires_grad=True).requires_grad
td.zero_grad()
td.zero_grad(set_to_none=False)
td.grad
td.contiguous()
td.contiguous().is_contiguous()
td.is_contiguous()
"""),
    ],
}
