"""Everyday code, and the type that a checker reveals for each expression, without modules: read by test_reveal.py."""

from typing import reveal_type

import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict, TensorDictBase
from tdstore.rl import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tdstore.types import DeviceLike, Entry, IndexType, NestedKey, SizeLike

td = TensorDict({"a": torch.zeros(3, 4)}, batch_size=[3])
mask = torch.ones(3, dtype=torch.bool)
reveal_type(td)  # TensorDict

# entries
reveal_type(td["a"])  # Any
reveal_type(td["a", "b"])  # Any
reveal_type(td.get("a"))  # Any
reveal_type(td.pop("a", None))  # Any
observation: Tensor = td["a"]

# rows
reveal_type(td[0])  # TensorDict
reveal_type(td[1:2])  # TensorDict
reveal_type(td[mask])  # TensorDict
reveal_type(td[[0, 2]])  # TensorDict
reveal_type(td[..., None])  # TensorDict
reveal_type(td[0:2, None])  # TensorDict
reveal_type(td.unbind(0))  # tuple[TensorDict, ...]
reveal_type(td.reshape(3, 1))  # TensorDict
reveal_type(td.view(3, 1))  # TensorDict
reveal_type(td.unsqueeze(0))  # TensorDict
reveal_type(td.masked_select(mask))  # TensorDict

# copies
reveal_type(td.clone())  # TensorDict
reveal_type(td.to("cpu"))  # TensorDict
reveal_type(td.cpu())  # TensorDict
reveal_type(td.cuda())  # TensorDict
reveal_type(td.contiguous())  # TensorDict
reveal_type(td.detach())  # TensorDict
reveal_type(td.apply(torch.sin))  # TensorDict
reveal_type(td.select("a"))  # TensorDict
reveal_type(td.update({"a": mask}))  # TensorDict
reveal_type(td.empty())  # TensorDict
reveal_type(td.to_tensordict())  # TensorDict
reveal_type(td.to_lazystack())  # LazyStackedTensorDict
reveal_type(td.lock_())  # TensorDict

# maths
reveal_type(td + 1)  # TensorDict
reveal_type(td.exp())  # TensorDict
reveal_type(td.sum())  # TensorDict
reveal_type(td.mean(dim=0))  # TensorDict
reveal_type(td.sum(reduce=True))  # Tensor
reveal_type(td.amax(reduce=True))  # Tensor
reveal_type(td.max(0).values)  # TensorDict
reveal_type(td.max(0, return_indices=False))  # TensorDict
reveal_type(td.all())  # bool
reveal_type(td.all(0))  # TensorDict
reveal_type(td.where(mask, td))  # TensorDict

# facts
reveal_type(td.batch_size)  # Size
reveal_type(td.size())  # Size
reveal_type(td.size(0))  # int
reveal_type(td.keys())  # KeysView[str]
reveal_type(td.keys(True, True))  # Collection[str | tuple[str, ...]]
reveal_type(td.values())  # Collection[Any]
reveal_type(td.items())  # Collection[tuple[str, Any]]
reveal_type(td.items(True))  # Collection[tuple[str | tuple[str, ...], Any]]
for key, _ in td.items():
    reveal_type(key)  # str

# places
reveal_type(td.save("place"))  # TensorDictBase
reveal_type(td.save("place", return_early=True))  # Future[TensorDictBase]
reveal_type(td.memmap("place"))  # TensorDict
reveal_type(td.consolidate())  # TensorDict
reveal_type(tdstore.open("place"))  # TensorDictBase
reveal_type(tdstore.load("place"))  # TensorDictBase
reveal_type(tdstore.from_schema({"a": ((4,), "float32")}, batch_size=[3]))  # TensorDictBase
reveal_type(TensorDict.load("place"))  # TensorDictBase
reveal_type(TensorDict.from_dict({"a": mask}))  # TensorDict
stored = tdstore.open("place")
reveal_type(stored[0])  # TensorDictBase
reveal_type(stored.clone())  # TensorDictBase
reveal_type(stored.read(slice(0, 2)))  # TensorDictBase

# several
reveal_type(tdstore.stack([td, td]))  # TensorDict
reveal_type(tdstore.cat([td, td]))  # TensorDict
reveal_type(TensorDict.stack([td, td]))  # TensorDict
lazy = tdstore.lazy_stack([td, td])
reveal_type(lazy)  # LazyStackedTensorDict
reveal_type(lazy[0])  # TensorDictBase
reveal_type(lazy.clone())  # LazyStackedTensorDict


# classes
class Step(tdstore.TensorClass):
    """A tensorclass."""

    reward: Tensor


step = Step(reward=torch.zeros(3), batch_size=[3])
reveal_type(step.reward)  # Tensor
reveal_type(step[0])  # Step
reveal_type(step.clone())  # Step
reveal_type(step.to("cpu"))  # Step
reveal_type(tdstore.stack([step, step]))  # Step


def rows(data: TensorDictBase, key: NestedKey, index: IndexType, size: SizeLike, device: DeviceLike) -> Entry:
    """Use the public aliases."""
    chosen = data[index]
    reveal_type(chosen)  # TensorDictBase
    made = TensorDict(batch_size=size, device=device)
    reveal_type(made)  # TensorDict
    return chosen.get(key)


# replay buffers
buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(10, device="cpu"),
    sampler=SliceSampler(num_slices=2, end_key=("next", "done"), traj_key=None),
    transform=torch.sin,
    batch_size=2,
)
reveal_type(buffer)  # TensorDictReplayBuffer
reveal_type(buffer.storage)  # Storage
reveal_type(buffer.sampler)  # Sampler
reveal_type(buffer.writer)  # Writer
reveal_type(buffer.extend(td))  # Tensor
reveal_type(buffer.add(td[0]))  # int | Tensor | None
reveal_type(buffer.set_storage(lambda: LazyMemmapStorage(10, scratch_dir="rows")))  # Storage
buffer.update_priority(torch.tensor([0, 1]), 0.5)
buffer.set_at_(("next", "done"), mask, slice(0, 3))
reveal_type(ReplayBuffer(storage=ListStorage(3)).extend([object(), "any object"]))  # Tensor
