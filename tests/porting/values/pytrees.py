"""TensorDicts as pytrees of torch, in optree-like code, in functions that map over anything."""

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack, tensorclass
from torch.utils import _pytree as pytree


@tensorclass
class Batch:
    obs: torch.Tensor
    extra: torch.Tensor


def tree_norm(tree):
    return torch.stack(
        [leaf.float().norm() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    ).norm()


def main():
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.arange(3), "c": torch.zeros(3, 2)}}, [3])
    leaves, spec = pytree.tree_flatten(td)
    print(len(leaves), [tuple(x.shape) for x in leaves], spec.num_leaves)
    rebuilt = pytree.tree_unflatten([x + 1 for x in leaves], spec)
    print(type(rebuilt).__name__, rebuilt.batch_size, rebuilt["n", "b"].tolist())
    mapped = pytree.tree_map(lambda x: x * 2, td)
    print(mapped["a"].tolist(), mapped.batch_size, type(mapped["n"]).__name__)
    summed = pytree.tree_map(lambda x: x.sum(), td)
    print(summed["n", "c"].shape, summed.batch_size)
    first = pytree.tree_map(lambda x: x[:2], td)
    print(first["n", "c"].shape, first.batch_size)

    state = {"model": td, "step": 3, "list": [td["n"], torch.ones(2)]}
    leaves, spec = pytree.tree_flatten(state)
    print(len(leaves), [x for x in leaves if isinstance(x, int)])
    again = pytree.tree_unflatten(leaves, spec)
    print((again["model"] == td).all(), type(again["list"][0]).__name__)
    print(round(tree_norm({"td": td, "t": torch.ones(2)}).item(), 4))

    batch = Batch(obs=torch.ones(2, 3), extra=torch.zeros(2), batch_size=[2])
    moved = pytree.tree_map(lambda x: x + 1, batch)
    print(type(moved).__name__, moved.obs.sum().item(), moved.batch_size)
    lazy = lazy_stack([TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.zeros(3)})])
    mapped = pytree.tree_map(lambda x: x - 1, lazy)
    print(isinstance(mapped, LazyStackedTensorDict), [x.tolist() for x in mapped.get("x", as_list=True)])
    valued = TensorDict({"x": torch.ones(2), "s": NonTensorData("text", batch_size=[2])}, [2])
    kept = pytree.tree_map(lambda x: x * 3 if isinstance(x, torch.Tensor) else x, valued)
    print(kept["x"].tolist(), kept["s"])
    print(pytree.tree_all(lambda x: isinstance(x, torch.Tensor), td), pytree.tree_any(lambda x: x.sum() == 3, td))

    counted = []
    td.apply(lambda x: counted.append(x.numel()), filter_empty=True)
    print(counted)
    keyed = td.named_apply(lambda name, x: x + len(name), nested_keys=False)
    print(keyed["a"].tolist(), keyed["n", "b"].tolist())
    both = td.apply(lambda x, y: x + y, td)
    print(both["n", "b"].tolist())
    fast = td.apply(lambda x: x + 1)
    print(fast["a"].tolist())
    out = torch.vmap(lambda t: t["a"] + t["n", "b"])(td)
    print(out.tolist())
