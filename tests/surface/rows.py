"""What every method is called with: each row is `name: expression | expression`.

An expression may use `td` (the container), `other` (a TensorDict in memory of the same form, other values), `row` (one
row of `other`), `M` (the module), `torch`, `mask` (bool, of the batch) and the helpers of `Namespace` in the test.
"""

from __future__ import annotations

import re

# Over leaves in (0, 1) of float32 and float64. They change nothing.
MATHS = """
add: td.add(1) | td.add(other) | td + 1 | 1 + td | td + other | td.add(other, alpha=2) | td.add(mask)
    | td.add(other.select("a"), default="intersection") | td.add(other.select("a"), default=torch.tensor(2.0))
    | td.add(other.select("a"))
sub: td.sub(1) | td - other | 1 - td | td.sub(other, alpha=2)
mul: td.mul(2) | td * other | 2 * td | td * torch.arange(4.0) | td * torch.arange(8.0).view(4, 2)
div: td.div(2) | td / other | 1 / td
pow: td.pow(2) | td ** 2 | td ** other | 2 ** td
maximum: td.maximum(other)
minimum: td.minimum(other)
clamp_max: td.clamp_max(0.5) | td.clamp_max(other)
clamp_min: td.clamp_min(0.5) | td.clamp_min(other)
clamp: td.clamp(0.2, 0.4) | td.clamp(other * 0, other)
lerp: td.lerp(other, 0.5) | td.lerp(reordered(other), 0.5)
addcdiv: td.addcdiv(other, other, value=2) | td.addcdiv(reordered(other), other)
addcmul: td.addcmul(other, other, value=2)
mod: td.mod(0.3) | td % 0.3
rsub: td.rsub(1)
isfinite: td.isfinite()
isnan: td.isnan()
isneginf: td.isneginf()
isposinf: td.isposinf()
isreal: td.isreal()
mean: td.mean() | td.mean(0) | td.mean((0, 1)) | td.mean(dim=1, keepdim=True) | td.mean(dim="feature")
    | td.mean(reduce=True)
sum: td.sum() | td.sum(0) | td.sum(-1, keepdim=True) | td.sum(dim="feature") | td.sum(reduce=True) | td.sum(5)
std: td.std() | td.std(0) | td.std(1, correction=0)
var: td.var() | td.var(0) | td.var(reduce=True)
prod: td.prod() | td.prod(0) | td.prod((0, 1))
nansum: td.nansum() | td.nansum(0)
nanmean: td.nanmean() | td.nanmean(1)
norm: td.norm() | td.norm(dtype=torch.float64)
amax: td.amax() | td.amax(0) | td.amax((0, 1), keepdim=True)
amin: td.amin() | td.amin(1)
max: td.max() | td.max(0).values | td.max(0).indices
min: td.min() | td.min(0).values
cummax: td.cummax(0).values | td.cummax(1).indices
cummin: td.cummin(0).values
logsumexp: td.logsumexp() | td.logsumexp(0)
softmax: td.softmax(0)
quantile: td.quantile(0.5) | td.quantile(0.25, dim=0)
abs: td.abs() | abs(td)
neg: td.neg() | -td
acos: td.acos()
asin: td.asin()
atan: td.atan()
ceil: td.ceil()
cos: td.cos()
cosh: td.cosh()
erf: td.erf()
erfc: td.erfc()
exp: td.exp()
expm1: td.expm1()
floor: td.floor()
frac: td.frac()
lgamma: td.lgamma()
log: td.log()
log10: td.log10()
log1p: td.log1p()
log2: td.log2()
reciprocal: td.reciprocal()
round: td.round()
sigmoid: td.sigmoid()
sign: td.sign()
sin: td.sin()
sinh: td.sinh()
sqrt: td.sqrt()
tan: td.tan()
tanh: td.tanh()
trunc: td.trunc()
dtype: td.dtype | td.select("a").dtype
requires_grad: td.requires_grad
is_floating_point: td.is_floating_point()
zero_grad: td.zero_grad() is td
grad: td.grad
"""

# Over leaves of float32, int64, bool and a value. They change nothing.
READS = """
get: td.get("a") | td.get(("n", "c")) | td.get("no") | td.get("no", 3) | td.get("s") | td["a"] | td["n", "c"]
    | td["no"] | td["a", "y"] | td[("n",)] | td[0] | td[1:3] | td[-1] | td[[2, 0, 0]] | td[mask] | td[mask[:, 0]]
    | td[torch.tensor([[0, 1], [3, 3]])] | td[:, 1] | td[..., 0] | td[None] | td[::2] | td[1:1] | td[0.5] | td[9]
    | td[::-1]
    | td[torch.tensor([True, False, True, False]), 1] | td[[0, 2], [1, 0]] | td[()] | td[np.array([1, 2])]
    | td[range(2)]
get_at: td.get_at("a", 0) | td.get_at("s", 0).tolist() | td.get_at(("n", "c"), slice(1, 3)) | td.get_at("no", 0, None)
    | td.get_at("a", mask)
get_item_shape: td.get_item_shape("a") | td.get_item_shape("no")
get_non_tensor: td.get_non_tensor("s") | td.get_non_tensor("no", 1)
entry_class: issubclass(td.entry_class("a"), torch.Tensor) | issubclass(td.entry_class("n"), M.TensorDictBase)
is_empty: td.is_empty() | td.empty().is_empty()
keys: list(td.keys()) | list(td.keys(True)) | list(td.keys(True, True)) | ("n", "c") in td.keys(True) | "a" in td
    | list(td.keys(sort=True))
    | list(td.keys(is_leaf=M.is_leaf_nontensor, leaves_only=True, include_nested=True)) | "no" in td.keys()
    | len(td.keys())
items: dict(td.items(True, True)) | [k for k, _ in td.items()]
values: list(td.values(True, True)) | len(list(td.values()))
non_tensor_items: [k for k, _ in td.non_tensor_items()]
sorted_keys: td.sorted_keys
clone: td.clone() | td.clone(False)
copy: td.copy() | copy.copy(td) | copy.deepcopy(td)
contiguous: td.contiguous()
empty: td.empty() | td.empty(recurse=True)
to_tensordict: td.to_tensordict()
to_dict: td.to_dict() | td.to_dict(convert_tensors=True)
replace: td.replace({"a": other["a"]}) | td.replace(a=other["a"]) | td.replace({}) is td
new_zeros: td.new_zeros(3, 2) | td.new_zeros((3, 2)) | td.new_zeros(td.batch_size, empty_lazy=True).batch_size
new_ones: td.new_ones(2)
new_full: td.new_full((2,), 1)
new_empty: td.new_empty(3, 2).shape | td.new_empty((5, 2))["a"].shape
apply: td.apply(lambda x: x + 1) | td.apply(lambda x, y: x == y, other)
    | td.apply(lambda x: x.flatten(0, 1), batch_size=[8])
    | td.apply(lambda x: None if x.dtype == torch.int64 else x) | td.apply(lambda x: x[0], batch_size=[2])
named_apply: td.named_apply(lambda k, x: x if k == "a" else None)
    | td.named_apply(lambda k, x: x if k != ("n", "c") else x * 2, nested_keys=True)
filter_non_tensor_data: td.filter_non_tensor_data()
masked_fill: td.masked_fill(mask, 1) | td.masked_fill(mask[:, 0], 0)
masked_select: td.masked_select(mask) | td.masked_select(mask[:, 0])
where: td.where(mask, other) | td.where(mask, other, out=td.clone()) | td.where(mask, 0) | td.where(mask[:, 0], other)
batch_dims: td.batch_dims
batch_size: td.batch_size
shape: td.shape
ndim: td.ndim
ndimension: td.ndimension()
dim: td.dim()
size: td.size() | td.size(0) | td.size(-1)
numel: td.numel()
depth: td.depth
device: td.device
names: td.names
cat: M.TensorDict.cat([td, other]) | torch.cat([td, other], 1) | torch.cat([td, td])
stack: M.TensorDict.stack([td, other]) | torch.stack([td, other], 1)
lazy_stack: M.TensorDict.lazy_stack([td, td]).contiguous()
maybe_dense_stack: M.TensorDict.maybe_dense_stack([td, other])
chunk: td.chunk(2) | td.chunk(2, 1)
split: td.split(3) | td.split([1, 3]) | td.split(1, 1)
tensor_split: td.tensor_split(3) | td.tensor_split([1, 2], 1)
unbind: td.unbind(0) | td.unbind(-1)
expand: td.expand(3, 4, 2) | td.expand(2) | td[:, :1].expand(4, 2)
expand_as: td.expand_as(torch.zeros(3, 4, 2))
broadcast_to: td.broadcast_to(3, 4, 2) | td.broadcast_to(shape=(3, 4, 2)).batch_size
flatten: td.flatten() | td.flatten(0, 1)
unflatten: td.unflatten(0, (2, 2))
view: td.view(8) | td.view(-1, 2, 2) | td.view(3) | td.select("a").view(torch.int32)
    | td.select("a").view(torch.uint8, batch_size=[4])
reshape: td.reshape(8) | td.reshape(2, -1) | td.reshape(size=(2, 4))
permute: td.permute(1, 0) | td.permute((0, 1)) is td
transpose: td.transpose(0, 1)
swapaxes: td.swapaxes(0, 1)
swapdims: td.swapdims(0, 1) | td.swapdims(axis0=0, axis1=1)
movedim: td.movedim(0, 1)
moveaxis: td.moveaxis(1, 0)
squeeze: td.squeeze() | td[:, :1].squeeze() | td[:, :1].squeeze(1)
unsqueeze: td.unsqueeze(0) | td.unsqueeze(-1)
atleast_1d: td.atleast_1d() | td[0, 0].atleast_1d()
atleast_2d: td[0].atleast_2d()
atleast_3d: td.atleast_3d()
gather: td.gather(0, torch.tensor([[0, 1], [2, 3], [0, 0]])) | td.gather(1, torch.tensor([[0], [1], [1], [0]]))
narrow: td.narrow(0, 1, 2)
flip: td.flip(0) | td.flip((0, 1)) | td.flip(dims=(0,))
fliplr: td.fliplr()
flipud: td.flipud()
roll: td.roll(1, 0) | td.roll(1)
rot90: td.rot90()
repeat: td.repeat(2, 1)
tile: td.tile(2)
repeat_interleave: td.repeat_interleave(2, dim=0)
pad: td.pad([1, 0])
select: td.select("a") | td.select(("n", "c"), "b") | td.select("no") | td.select("no", strict=False)
exclude: td.exclude("a") | td.exclude(("n", "c"))
rename_keys: td.rename_keys({"a": "x", ("n", "c"): "y"}) | td.rename_keys({"a": "b", "b": "a"}) |
    td.rename_keys({"a": "b"}) | td.rename_keys({"no": "x"}) | td.rename_keys({"no": "x"}, strict=False)
pack: td.select("a", ("n", "c")).float().pack()[0] | td.select("a", ("n", "c")).float().pack(0)[1].keys | td.pack() |
    (lambda flat, layout: layout.unpack(flat))(*td.select("a", ("n", "c")).float().pack())
split_keys: td.split_keys(["a"]) | td.split_keys(["a"], [("n", "c")])
flatten_keys: td.flatten_keys() | td.flatten_keys("/")
unflatten_keys: td.flatten_keys("/").unflatten_keys("/")
to: td.to(torch.float64) | td.to("cpu") | td.to(torch.device("cpu")).device
cpu: td.cpu()
data: td.data
detach: td.detach()
bytes: td.bytes()
param_count: td.param_count()
is_contiguous: td.to_tensordict().is_contiguous()
is_cpu: td.to("cpu").is_cpu
is_cuda: td.is_cuda
is_meta: td.is_meta
is_non_tensor: td.is_non_tensor()
is_locked: td.is_locked in (True, False)
is_memmap: td.is_memmap() in (True, False)
is_shared: td.is_shared() in (True, False)
is_consolidated: td.is_consolidated() in (True, False)
all: td.all() | td.all(0)
any: td.any() | td.any(1)
logical_and: td.select("a", "b").logical_and(other.select("a", "b"))
bitwise_and: td.select("b").bitwise_and(other.select("b")) | td.select("b") & other.select("b")
cat_tensors: td.clone().cat_tensors("a", "a2", out_key="x")
    | td.select("a").to_tensordict().set("a2", other["a"]).cat_tensors("a", "a2", out_key="x")
cat_from_tensordict: td.select("a").to_tensordict().set("a2", other["a"]).cat_from_tensordict(dim=0)
stack_from_tensordict: td.select("a").to_tensordict().set("a2", other["a"]).stack_from_tensordict()
stack_tensors: td.select("a").to_tensordict().set("a2", other["a"]).stack_tensors("a", "a2", out_key="x")
separates: td.to_tensordict().separates("a") is None
densify: td.densify()
to_lazystack: td.to_lazystack(0).contiguous()
rename: td.rename("x", "y").names
bfloat16: td.bfloat16()
bool: td.bool()
complex64: td.complex64()
complex128: td.complex128()
complex32: td.complex32()
double: td.double()
float: td.float()
float16: td.float16()
float32: td.float32()
float64: td.float64()
half: td.half()
int: td.int()
int8: td.int8()
int16: td.int16()
int32: td.int32()
int64: td.int64()
uint8: td.uint8()
uint16: td.uint16()
uint32: td.uint32()
uint64: td.uint64()
type: td.type(torch.float64)
qint8: td.qint8()
qint32: td.qint32()
quint8: td.quint8()
quint4x2: td.quint4x2()
from_dict: M.TensorDict.from_dict(td.to_dict(), batch_size=[4, 2])
    | M.TensorDict.from_dict(td.to_dict(), auto_batch_size=True)
from_dict_instance: td.from_dict_instance(td.to_dict(), batch_size=[4, 2])
fromkeys: M.TensorDict.fromkeys(td.keys(True, True), 1)
from_schema: M.TensorDict.from_schema({"x": ((3,), torch.float32), ("n", "y"): ((), torch.int64)}, batch_size=[4])
numpy: td.numpy()
tolist: td.select("a", "b").tolist()
to_pytree: td.select("a", "n").to_pytree()
from_pytree: M.TensorDict.from_pytree({"x": torch.ones(2), "y": [torch.zeros(2), torch.ones(2)]}).to_pytree()
to_namedtuple: td.select("a", "b").to_namedtuple()._asdict()
from_namedtuple: M.TensorDict.from_namedtuple(td.select("a", "b").to_namedtuple(), batch_size=[4, 2])
from_any: M.TensorDict.from_any({"x": np.ones(3), "y": {"z": 1}})
from_list: M.TensorDict.from_list([{"x": torch.ones(2)}, {"x": torch.zeros(2)}]).contiguous()
from_tuple: M.TensorDict.from_tuple((torch.ones(2), torch.zeros(2)))
from_struct_array: M.TensorDict.from_struct_array(np.array([(1, 2.0), (3, 4.0)], dtype=[("x", "i8"), ("y", "f4")]))
to_struct_array: td.select("a", "b")[:, 0].to_struct_array().tolist()
to_padded_tensor: td.to_tensordict().to_padded_tensor()
state_dict: dict(td.select("a", "n").state_dict())
consolidate: td.consolidate().unlock_()
data_ptr: bool(td.to_tensordict().data_ptr())
new_tensor: td.new_tensor(other)
as_tensor: td.as_tensor()["a"]
clear_refs_for_compile_: td.clone().clear_refs_for_compile_() is not None
"""

# They change entries and add none. On stored data the change is read back from a fresh opening.
WRITES = """
set_: td.set_("a", other["a"]) | td.set_(("n", "c"), other["n", "c"]) | td.set_("no", 1)
    | td.set_("a", torch.zeros(3)) | td.set_("b", other["a"][..., 0])
set_at_: td.set_at_("a", 0.0, 1) | td.set_at_(("n", "c"), other["n", "c"][:2], slice(0, 2))
    | td.set_at_("a", other["a"][mask], mask) | td.set_at_("no", 1, 0)
update_: td.update_(other) | td.update_({"a": other["a"]}) | td.update_({"no": 1}) | td.update_(reordered(other))
update_at_: td.update_at_(row, 2) | td.update_at_(other[1:3], slice(0, 2)) | td.update_at_({"b": other["b"][0]}, 0)
    | td.update_at_({"no": 1}, 0)
copy_: td.copy_(other)
copy_at_: td.copy_at_(row, 0)
fill_: td.fill_("a", 1.0) | td.fill_(("n", "c"), 0) | td.fill_("n", 1)
zero_: td.zero_()
masked_fill_: td.masked_fill_(mask, 1) | td.masked_fill_(mask[:, 0], 0)
apply_: td.apply_(lambda x: x * 0) | td.apply_(lambda x, y: y, other)
__setitem__: setitem(td, 0, row) | setitem(td, slice(1, 3), other[1:3]) | setitem(td, mask, other[mask])
    | setitem(td, [3, 1], other[[1, 3]])
    | setitem(td, (slice(None), 1), other[:, 0]) | setitem(td, 2, 0)
    | setitem(td, torch.tensor([0, 0]), other[[0, 1]])
    | setitem(td, 0, {"a": row["a"]}) | setitem(td, None, other[None]) | setitem(td, 9, row)
update: td.update({"a": other["a"]}, inplace=True) | td.update(other, inplace=True)
set: td.set("a", other["a"], inplace=True) | td.set(("n", "c"), other["n", "c"], inplace=True)
"""

# In-place maths, over the floats.
MATHS_IN_PLACE = """
add_: td.add_(1) | td.add_(other) | iadd(td, 1) | td.add_(other, alpha=2) | td.add_(reordered(other))
sub_: td.sub_(1) | isub(td, other) | td.sub_(other, 2)
mul_: td.mul_(2) | imul(td, other)
div_: td.div_(2) | idiv(td, other)
pow_: td.pow_(2) | td.pow_(other)
maximum_: td.maximum_(other)
minimum_: td.minimum_(other)
clamp_max_: td.clamp_max_(0.5)
clamp_min_: td.clamp_min_(other)
lerp_: td.lerp_(other, 0.5) | td.lerp_(reordered(other), 0.5)
addcdiv_: td.addcdiv_(other, other)
addcmul_: td.addcmul_(other, other, value=2)
abs_: td.abs_()
acos_: td.acos_()
asin_: td.asin_()
atan_: td.atan_()
ceil_: td.ceil_()
cos_: td.cos_()
cosh_: td.cosh_()
erf_: td.erf_()
erfc_: td.erfc_()
exp_: td.exp_()
expm1_: td.expm1_()
floor_: td.floor_()
frac_: td.frac_()
lgamma_: td.lgamma_()
log_: td.log_()
log10_: td.log10_()
log1p_: td.log1p_()
log2_: td.log2_()
neg_: td.neg_()
reciprocal_: td.reciprocal_()
round_: td.round_()
sigmoid_: td.sigmoid_()
sign_: td.sign_()
sin_: td.sin_()
sinh_: td.sinh_()
sqrt_: td.sqrt_()
tan_: td.tan_()
tanh_: td.tanh_()
trunc_: td.trunc_()
detach_: td.detach_()
requires_grad_: td.to_tensordict().requires_grad_().requires_grad
"""

# They change the set of entries, the batch size or the names: refused where the container is locked.
STRUCTURE = """
set: td.set("x", other["a"]) | td.set(("n", "y"), other["b"]) | td.set(("new", "z"), other["b"])
    | td.set("a", torch.zeros(3)) | td.set("a", other["b"])
    | setitem(td, "x", other["a"]) | setitem(td, ("n", "y"), other["b"]) | td.set("t", "text")
set_non_tensor: td.set_non_tensor("t", {"k": 1})
setdefault: td.setdefault("x", other["a"]) | td.setdefault("a", other["a"])
update: td.update({"x": other["a"]}) | td.update({"n": {"y": other["b"]}}) | td.update(x=other["a"])
    | td.update({"a": other["b"], "bad": torch.zeros(3)})
del_: td.del_("a") | td.del_(("n", "c")) | td.del_("no") | delitem(td, "a")
pop: td.pop("a") | td.pop(("n", "c")) | td.pop("no", 3) | td.pop("no")
popitem: td.popitem()[0]
clear: td.clear()
rename_key_: td.rename_key_("a", "x") | td.rename_key_("a", ("n", "a")) | td.rename_key_("a", "b", safe=True)
    | td.rename_key_("no", "x")
create_nested: td.create_nested("x") | td.create_nested(("n", "x"))
filter_empty_: td.filter_empty_()
select: td.select("a", inplace=True)
exclude: td.exclude("a", inplace=True)
flatten_keys: td.flatten_keys(".", inplace=True)
unflatten_keys: td.flatten_keys(".", inplace=True).unflatten_keys(".", inplace=True)
replace: td.replace({"x": other["a"]})
"""

# They concern what is around the entries, and are allowed on a locked container.
AROUND = """
batch_size: assign(td, "batch_size", [4])
auto_batch_size_: td.auto_batch_size_() | td.auto_batch_size_(1)
names: assign(td, "names", ["x", "y"]) | assign(td, "names", ["x", "x"]) | assign(td, "names", ["x"])
rename_: td.rename_("x", "y")
refine_names: td.refine_names("x", ...)
clear_device_: td.clear_device_() is not None
lock_: td.lock_().is_locked
unlock_: td.unlock_().is_locked
auto_device_: td.auto_device_().device
"""

ELSEWHERE = {
    "map map_iter": "tests/parallel: they start processes",
    "all_gather all_reduce arecv asend broadcast from_remote_init gather_and_stack init_remote irecv isend recv reduce "
    "scatter send": "tests/parallel",
    "close commit read": "tests/tensordicts",
    "transaction": "tests/container/storage/test_transactions.py",
    "verify": "tests/tensordicts/persistent/test_verify.py",
    "dumps from_h5 from_zarr load load_ load_memmap load_memmap_ make_memmap make_memmap_from_storage "
    "make_memmap_from_tensor memmap memmap_ memmap_like memmap_refresh_ save saved_path share_memory_ to_h5 to_store "
    "to_zarr": "tests/tensordicts and tests/builtin/memmap: they make other containers",
    "append extend refresh_ resize_": "tests/container/storage/test_growing.py",
    "astype_ permute_features_": "tests/container/persistence/test_reshaping.py",
    "from_consolidated": "tests/io/consolidated/test_consolidate.py",
    "from_module from_modules to_module load_state_dict": "tests/modules",
    "from_optimizer to_optimizer": "tests/modules/test_checkpoints.py",
    "from_arrow from_csv from_dataclass from_json from_npz from_pandas from_parquet from_safetensors to_arrow "
    "to_arrow_reader to_csv to_json to_mds to_pandas to_parquet to_safetensors": "tests/convert",
    "cuda pin_memory pin_memory_ record_stream": "tests/builtin/test_cuda.py: they need a GPU",
    "attrs": "tests/tensorclass/test_attrs.py",
    "backward": "tests/convert",
}


def parse(table: str) -> dict[str, list[str]]:
    """name -> its expressions."""
    joined = re.sub(r"\n +", " ", table.strip())
    rows: dict[str, list[str]] = {}
    for line in joined.splitlines():
        name, _, calls = line.partition(": ")
        assert name not in rows, name
        rows[name] = [call.strip() for call in calls.split(" | ")]
    return rows
