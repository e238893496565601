"""Jagged tensors, values per row and values for all rows in one TensorDict, split and joined for workers."""

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.tensorclass import NonTensorData as Data
from tensordict.tensorclass import NonTensorStack as Stack


def get_tensordict(tensors, non_tensors=None):
    size, entries = None, {}
    for key, value in tensors.items():
        if isinstance(value, list):
            value = Stack.from_list([Data(item) for item in value])
        entries[key] = value
        length = value.size(0) if isinstance(value, torch.Tensor) else len(value)
        assert size in (None, length), key
        size = length
    for key, value in (non_tensors or {}).items():
        entries[key] = NonTensorData(value)
    return TensorDict(source=entries, batch_size=[size])


def plain(td, key):
    value = td.get(key)
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return value.data if isinstance(value, NonTensorData) else value


def index_select(td, indices):
    out = {}
    for key, value in td.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            rows = value.unbind(0)
            out[key] = torch.nested.as_nested_tensor([rows[i] for i in indices], layout=torch.jagged)
        elif isinstance(value, torch.Tensor):
            out[key] = value[indices]
    return TensorDict(out, batch_size=[len(indices)])


def main():
    lengths = [2, 5, 1, 3]
    ids = torch.nested.as_nested_tensor([torch.arange(n) + 10 * n for n in lengths], layout=torch.jagged)
    td = get_tensordict(
        {"ids": ids, "reward": torch.tensor([0.1, 0.2, 0.3, 0.4]), "source": ["math", "code", "math", "chat"]},
        {"epoch": 3, "config": {"lr": 0.1}},
    )
    print(td.batch_size, sorted(td.keys()), td["ids"].is_nested, td["ids"].offsets().tolist())
    print(plain(td, "source"), plain(td, "epoch"), plain(td, "config"))
    print(td["source"] if isinstance(td["source"], list) else td["source"].tolist(), td["epoch"], td["config"])

    chunks = td.chunk(2)
    print(len(chunks), [c.batch_size for c in chunks], [plain(c, "source") for c in chunks])
    print([[row.tolist() for row in c["ids"].unbind(0)] for c in chunks], [c["epoch"] for c in chunks])

    row = td[1]
    print(row.batch_size, row["ids"].tolist(), row["source"], row["epoch"])
    picked = index_select(td, [3, 0])
    print([r.tolist() for r in picked["ids"].unbind(0)], picked["reward"].tolist())
    kept = td.select("reward", "source")
    masked = kept[kept["reward"] > 0.15]
    print(masked.batch_size, plain(masked, "source"))

    td["padded"] = ids.to_padded_tensor(-1)
    print(td["padded"].tolist())
    mask = torch.nested.as_nested_tensor([torch.ones(n, dtype=torch.bool) for n in lengths], layout=torch.jagged)
    td["mask"] = mask
    print(td["mask"].values().sum().item(), td["mask"].dtype, td["ids"].values().tolist())

    both = torch.cat([kept, kept[:1]], 0)
    print(both.batch_size, plain(both, "source"), both["reward"].shape)
    stack = NonTensorStack("a", "b", "c")
    print(stack.tolist(), stack.batch_size, stack[1].data if hasattr(stack[1], "data") else stack[1])
    td.pop("padded")
    td.set("uid", NonTensorStack(*[f"id{i}" for i in range(4)]))
    print(td["uid"] if isinstance(td["uid"], list) else td["uid"].tolist(), td[2]["uid"], sorted(td.keys()))
    popped = td.pop("config")
    print(popped if isinstance(popped, dict) else popped.data, "config" in td)
    td.set_non_tensor("note", "checked")
    print(td.get_non_tensor("note"), td["note"], td.clone()["note"], td.to_dict()["note"])
