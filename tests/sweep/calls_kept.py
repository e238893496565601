"""More calls: copies, conversions and storage."""

from __future__ import annotations

from .calls import lines

KEPT: dict[str, list[str]] = {
    "copies": lines("""
td.clone()
td.clone(False)
td.clone(recurse=False)
td.clone(recurse=True)
td.copy()
copy.copy(td)
copy.deepcopy(td)
td.empty()
td.empty(recurse=True)
td.empty(True)
td.empty(batch_size=[2])
td.empty(device="cpu")
td.empty(names=["x", "y"])
td.to_tensordict()
td.to_tensordict(retain_none=True)
td.to_dict()
td.to_dict(retain_none=False)
td.to_dict(convert_tensors=True)
td.to_dict(convert_tensors="numpy")
td.tolist()
td.tolist(convert_tensors=True)
td.select("i").tolist(convert_tensors=True)
td.to_namedtuple()
td.to_namedtuple().a
td.to_pytree()
td.numpy()
td.to_struct_array().dtype.names
td.select("i").to_struct_array().tolist()
td.contiguous(canonical=True)
td.contiguous(inplace=True)
td.densify()
td.densify(layout=torch.jagged)
td.to_lazystack()
td.to_lazystack(1)
td.to_lazystack(dim=0)
td.to_padded_tensor()
td.to_padded_tensor(padding=1, mask_key="mask")
td.new_zeros(2)
td.new_zeros(2, 3)
td.new_zeros((2, 3))
td.new_ones((2,), dtype=torch.int8)
td.new_ones(torch.Size([2]))
td.new_full((2,), 3)
td.new_full((2,), fill_value=3.0, dtype=torch.float64)
td.new_empty(2).batch_size
td.new_empty((0, 3))
td.new_zeros(2, device="cpu").device
td.new_zeros(2, requires_grad=False)
td.select("i").new_tensor(torch.ones(2))
td.new_tensor(other)
td.new_tensor(torch.zeros(3, 2))
td.apply(lambda x: x + 1)
td.apply(lambda x, y: x + y, other)
td.apply(lambda x, y: x + y, other.exclude("a"))
td.apply(lambda x, y: x if y is None else y, other.exclude("a"), default=None)
td.apply(lambda x: x[0], batch_size=[3])
td.apply(lambda x: x.unsqueeze(0), batch_size=[1, 4, 3])
td.apply(lambda x: x * 0, inplace=True)
td.apply(lambda x: None)
td.apply(lambda x: None, filter_empty=False)
td.apply(lambda x: None, filter_empty=True)
td.apply(lambda x: None if x.dtype == torch.bool else x)
td.apply(lambda x: x, device="cpu").device
td.apply(lambda x: x.float(), device=None)
td.apply(lambda x: x, names=["x", "y"]).names
td.apply(lambda x: x, propagate_lock=True)
td.apply(lambda x: x, out=td.clone())
td.apply(lambda x: x + 1, call_on_nested=True)
td.apply(lambda x: x.clone(), call_on_nested=True)
td.apply(fn=lambda x: x + 1)
td.apply_(lambda x: x.zero_())
td.apply_(lambda x: x + 1)
td.apply_(lambda x, y: y, other)
td.named_apply(lambda k, x: x if k == "a" else None)
td.named_apply(lambda k, x: x if k == ("n", "b") else None, nested_keys=True)
td.named_apply(lambda k, x, y: x + y, other)
td.named_apply(lambda k, x: x, inplace=True)
td.named_apply(lambda k, x: x + 1, inplace=True, nested_keys=True)
td.apply(torch.ones_like)
td.apply(lambda x: 1)
td.apply(3)
td.fromkeys(["a", "b"])
td.fromkeys(["a", ("n", "b")], value=1)
td.from_dict({"a": torch.zeros(3)}, batch_size=[3])
td.from_dict({"a": torch.zeros(3)}, auto_batch_size=True)
td.from_dict_instance(td.to_dict())
td.from_dict_instance(td.to_dict(), batch_size=[4])
td.from_any({"a": torch.zeros(3)})
td.from_any(td)
TensorDict.from_any(td)
TensorDict.from_any(td) is td
TensorDict.from_dict(td)
TensorDict.from_dict(td.to_dict(), batch_size=[4])
TensorDict.from_dict(td.to_dict(), auto_batch_size=True)
TensorDict(td)
TensorDict(td, batch_size=[4])
TensorDict(td, [4, 3])
TensorDict(dict(td), [4, 3])
TensorDict({"x": td}, [4])
TensorDict({"x": td}, [4]).get("x") is td
TensorDict(x=td, batch_size=[])
TensorDict({"x": td[0]}, [3])
make_tensordict(td, auto_batch_size=True)
make_tensordict(dict(td.items()), batch_size=[4])
merge_tensordicts(td, other)
merge_tensordicts(other, td, callback_exist=lambda x, y: x)
assert_close(td, td)
assert_close(td, other)
assert_close(td, td.clone(), rtol=1e-3)
td.state_dict().keys()
list(td.state_dict(flatten=False))
td.state_dict(prefix="p.").keys()
td.load_state_dict(other.state_dict())
td.load_state_dict(other.state_dict(), assign=True)
td.load_state_dict({}, strict=False)
td.load_state_dict({})
pickle.loads(pickle.dumps(td)).batch_size
pickle.loads(pickle.dumps(td))
repr(td).splitlines()[0].split("(")[0]
str(td)
format(td)
torch.utils._pytree.tree_map(lambda x: x + 1, td)
[x.shape for x in torch.utils._pytree.tree_leaves(td)]
torch.vmap(lambda x: x + 1)(td)
torch.vmap(lambda x: x["a"])(td)
torch.vmap(lambda x: x["a"] * 2, in_dims=1)(td)
torch.vmap(lambda x, y: x["a"] + y, (0, None))(td, torch.ones(2))
torch.utils.data.default_collate([td, td]) is not None
"""),
    "storage": lines("""
td.memmap()
td.memmap(at())
td.memmap(prefix=at(), num_threads=2)
td.memmap(at(), copy_existing=True)
td.memmap(at()).is_memmap()
td.memmap(at()).is_locked
td.memmap(at(), share_non_tensor=True)
td.memmap(at(), existsok=False)
td.memmap_(at())
td.memmap_()
td.memmap_(at(), copy_existing=True)
td.memmap_(at()).is_memmap()
td.memmap_like(at())
td.memmap_like(at()).get("a").shape
td.memmap_like()
td.save(at())
td.dumps(at())
TensorDict.load_memmap(td.save(p := at()) and p)
TensorDict.load(td.save(p := at()) and p)
load_memmap = TensorDict.load_memmap; td.memmap(p := at()); load_memmap(p)["a"]
td.memmap(p := at()); TensorDict.load_memmap(p, device="cpu").device
td.memmap(p := at()); type(td).load_memmap(p)
td.memmap(p := at()); type(TensorDict.load_memmap(p).get("a")).__name__
td.memmap(p := at()); other.clone().load_memmap_(p)
td.memmap(p := at()); sorted(os.listdir(p))[:3] if False else TensorDict.load_memmap(p).batch_size
other.save(p := at()); td.load_memmap_(p)
other.save(p := at()); td.load_(p)
td.memmap_refresh_()
td.make_memmap("z", (4, 3)).shape
td.make_memmap("z", shape=torch.Size([4, 3]), dtype=torch.int8); td["z"].dtype
td.make_memmap_from_tensor("z", torch.ones(4, 3))
td.make_memmap_from_tensor("z", torch.ones(4, 3)); td["z"]
td.share_memory_()
td.share_memory_().is_shared()
td.to_h5(at(".h5"))
td.to_h5(at(".h5"))["a"]
td.to_h5(at(".h5")).is_locked
td.to_h5(at(".h5")).to_tensordict()
td.to_h5(filename=at(".h5"), compression="gzip")["n", "b"]
PersistentTensorDict.from_dict(td, filename=at(".h5"))
PersistentTensorDict.from_dict(td.to_dict(), at(".h5"), batch_size=[4])["a"]
td.to_h5(p := at(".h5")).close(); PersistentTensorDict.from_h5(p)["a"]
td.to_h5(p := at(".h5")).close(); TensorDict.from_h5(p).batch_size
td.to_zarr(at(".zarr"))["a"]
td.consolidate()
td.consolidate().is_consolidated()
td.consolidate(at())
td.consolidate(at(), num_threads=1)["n", "b"]
td.consolidate(metadata=True).batch_size
td.consolidate(p := at()); TensorDict.from_consolidated(p)
td.consolidate(inplace=True)
td.consolidate(share_memory=True).is_consolidated()
td.consolidate(use_buffer=True, filename=at())
torch.save(td, p := at()); torch.load(p, weights_only=False)
td.save(p := at()); td.load_memmap(p)
td.lock_().memmap(at())
td.clone().lock_().is_locked
td.unlock_().is_locked
td.lock_().clone().is_locked
td.lock_()[0].is_locked
td.lock_().select("a").is_locked
td.lock_().view(12).is_locked
td.lock_().get("n").is_locked
td.lock_().get("n").unlock_()
td.lock_().set("new", torch.zeros(4, 3))
td.lock_().set_("a", torch.zeros(4, 3, 2))
td.lock_().update_(other)
td.lock_().pop("a")
td.lock_().rename_key_("a", "z")
td.lock_()["n"].set("b", torch.zeros(4, 3))
td.lock_().batch_size
td.lock_().to("cpu").is_locked
td.lock_().apply(lambda x: x, propagate_lock=True).is_locked
td.to_module(torch.nn.Linear(2, 2))
td.record_stream(None)
td.map(lambda x: x, num_workers=0)
td.copy().update(other)
td.lock_().clear()
td.lock_().del_("a")
td.lock_().zero_()
td.lock_().fill_("a", 1)
td.lock_().add_(1)
td.lock_().setdefault("a", 1)
td.lock_().setdefault("new", torch.zeros(4, 3))
td.lock_().create_nested("z")
td.lock_().select("a", inplace=True)
td.lock_().flatten_keys(".", inplace=True)
"""),
}
