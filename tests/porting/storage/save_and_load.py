"""Top-level functions and methods for saving: save, load, memmap copies, pickles, consolidated files."""

import io
import pickle
from pathlib import Path

import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack


def example():
    return TensorDict(
        {
            "a": torch.arange(6).view(3, 2),
            "nested": {"b": torch.ones(3, 1, dtype=torch.bfloat16), "c": {"d": torch.zeros(3, dtype=torch.bool)}},
            "label": NonTensorData("first", batch_size=[3]),
        },
        batch_size=[3],
    )


def main():
    td = example()
    tensordict.save(td, "one")
    loaded = tensordict.load("one")
    print(type(loaded).__name__, loaded.batch_size, loaded["nested", "c", "d"].dtype, loaded["label"])
    print((loaded == td).all(), loaded["nested", "b"].dtype)

    td.save("two")
    print((TensorDict.load("two")["a"] == td["a"]).all().item(), Path("two").is_dir())
    on_disk = td.memmap("three", num_threads=2)
    print(on_disk.is_memmap(), td.is_memmap(), on_disk["a"].sum().item())

    buffer = io.BytesIO()
    torch.save(td, buffer)
    buffer.seek(0)
    restored = torch.load(buffer, weights_only=False)
    print((restored == td).all(), restored["label"], restored.is_locked)
    copied = pickle.loads(pickle.dumps(on_disk))
    print(copied.is_memmap(), copied["a"].tolist())

    numbers = td.exclude("label")
    whole = numbers.consolidate()
    print(
        (whole == numbers).all(),
        whole["a"].untyped_storage().data_ptr() == whole["nested", "b"].untyped_storage().data_ptr(),
    )
    sent = pickle.loads(pickle.dumps(whole))
    print((sent == numbers).all())
    numbers.consolidate("file.mmap", num_threads=1)
    from_file = TensorDict.from_consolidated("file.mmap")
    print(from_file["nested", "b"].sum().item(), Path("file.mmap").is_file())

    ragged = lazy_stack([TensorDict({"x": torch.ones(n)}, []) for n in (2, 4)])
    ragged.memmap("ragged")
    back = LazyStackedTensorDict.load_memmap("ragged")
    print(type(back).__name__, [tuple(x.shape) for x in back.get("x", as_list=True)])
    target = td.exclude("label").clone().zero_()
    target.load_memmap_("three")
    print(target["a"].tolist())
