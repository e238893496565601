"""The containers that calls are made on."""

from __future__ import annotations

from tests.cuda import mode

MAKE = """
kinds = {}
def classed(source, base=None):
    fields = tuple(source.keys())
    key = (base, fields)
    if key not in kinds:
        hints = {"__annotations__": dict.fromkeys(fields, Any)}
        kinds[key] = type("Item", (base or TensorClass,), hints)
    return kinds[key](**dict(source.items()), batch_size=source.batch_size, names=source.names)
def stored(source, suffix, **kwargs):
    return PersistentTensorDict.from_dict(source, filename=at(suffix), batch_size=source.batch_size, **kwargs)
def window(source):
    twice = torch.cat([source, source])
    part = slice(0, len(source))
    return twice._get_sub_tensordict(part) if M.is_peer else stored(twice, ".h5")[part]
"""

PLACES = {
    "memory": "source()",
    "text": "source(s='text')",
    "locked": "source().lock_()",
    "nested": "TensorDict({'n': source()}, [4]).get('n')",
    "memmap": "source().memmap_(at())",
    "loaded": "(source().memmap(p := at()), TensorDict.load_memmap(p, mode='r+'))[1]",
    "shared": "source().share_memory_()",
    "h5": "stored(source(), '.h5')",
    "zarr": "stored(source(), '.zarr', backend='zarr')",
    "lazy": "lazy_stack(list(source()))",
    "lazy 1": "lazy_stack(list(source().unbind(1)), 1)",
    "params": "TensorDictParams(source())",
    "window": "window(source())",
    "class": "classed(source())",
    "typed": "classed(source(), TypedTensorDict)",
    "class over memmap": "classed(source()).memmap_(at())",
    "class over lazy": "lazy_stack([classed(x) for x in source()])",
    "value": "NonTensorData('text', batch_size=[4, 3])",
    "stack of values": "NonTensorStack(*(NonTensorStack(*(f'{i}{j}' for j in range(3))) for i in range(4)))",
}

# Containers of a GPU, beside which indices and new values are on the CPU; and one where everything is on the GPU, by
# torch's default device.
EVERYTHING = "all on cuda"
ON_CUDA = {
    "cuda": "source().to('cuda')",
    "text on cuda": "source(s='text').to('cuda')",
    "no device on cuda": "source().to('cuda').clear_device_()",
    "lazy on cuda": "lazy_stack(list(source().to('cuda')))",
    "class on cuda": "classed(source()).to('cuda')",
    "params on cuda": "TensorDictParams(source()).to('cuda')",
    EVERYTHING: "source()",
}
if mode.ON:
    PLACES |= ON_CUDA
