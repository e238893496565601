"""Entries that are not tensors: texts, dicts, arrays of objects; set, read, stacked, indexed, compared, removed."""

import torch
from tensordict import MetaData, NonTensorData, NonTensorStack, TensorDict, is_non_tensor, lazy_stack
from tensordict.utils import is_non_tensor as is_value


class Vocabulary:
    def __init__(self, words):
        self.words = list(words)

    def __eq__(self, other):
        return isinstance(other, Vocabulary) and self.words == other.words

    def __hash__(self):
        return hash(tuple(self.words))


def main():
    td = TensorDict({"x": torch.arange(3), "title": "a title", "vocabulary": Vocabulary("ab")}, [3])
    print(td["title"], td["vocabulary"].words, sorted(td.keys()), is_value(td.get("title")))
    print(type(td.get("title")).__name__, td.get("title").data, td.get("title").batch_size)
    td["title"] = "another"
    td.set("size", NonTensorData(3, batch_size=[3]))
    td.set_non_tensor("options", {"shuffle": True})
    print(td["title"], td["size"], td.get_non_tensor("options"), td[1]["options"])

    row = td[0]
    print(row["title"], row.batch_size, td[:2]["vocabulary"] == Vocabulary("ab"))
    rows = [td[i].set("title", f"row {i}") for i in range(3)]
    stack = torch.stack(rows)
    print(list(stack["title"]), stack[2]["title"], stack["options"], stack["x"].tolist())
    print(type(stack.get("title")).__name__, stack.get("title").tolist(), stack[1:].get("title").batch_size)
    picked = stack[torch.tensor([2, 0])]
    print(list(picked["title"]), picked["x"].tolist())
    lazy = lazy_stack(rows)
    print(list(lazy["title"]), lazy[0]["title"])
    lazy[1]["title"] = "changed"
    print(list(lazy["title"]), rows[1]["title"])

    values = NonTensorStack("a", "b", "c")
    print(
        values.tolist(), values[0].data if is_non_tensor(values[0]) else values[0], len(values), is_non_tensor(values)
    )
    words = TensorDict({"words": values, "n": torch.zeros(3)}, [3])
    print(list(words["words"]), words[1]["words"], [r["words"] for r in words.unbind(0)])
    both = torch.cat([words, words[:1]], 0)
    print(list(both["words"]), both.batch_size)
    words[0] = TensorDict({"words": "z", "n": torch.ones(())}, [])
    print(list(words["words"]), words["n"].tolist())

    print(sorted(td.to_dict()), td.to_dict()["title"], td.exclude("vocabulary", "options").to_dict()["size"])
    flat = TensorDict({"a": {"text": "deep"}, "b": torch.zeros(())}).flatten_keys(".")
    print(flat["a.text"], flat.unflatten_keys(".")["a", "text"])
    numbers = td.select("x", "title").apply(lambda x: x + 1)
    print(numbers["x"].tolist(), numbers["title"])
    print({k: is_non_tensor(v) for k, v in td.items()}, {k: type(v).__name__ for k, v in td.items()}["title"])
    print(sorted(str(k) for k in td.keys(True, True)), len(list(td.values(True, True))))
    print((td.select("x", "title") == td.select("x", "title").clone()).all())
    expanded = td.unsqueeze(0).expand(2, 3)
    print(expanded.batch_size, expanded[1, 2]["title"])
    reshaped = words.reshape(3, 1)
    print(reshaped.batch_size, reshaped[2, 0]["words"])
    popped = td.pop("title")
    print(popped if isinstance(popped, str) else popped.data, "title" in td)
    td.rename_key_("size", "count")
    print(td["count"], td.get("missing", "default"), td.set("note", "new")["note"])
    meta = TensorDict({"info": MetaData({"fps": 30}), "x": torch.zeros(2)}, [2])
    print(meta["info"], torch.stack([meta, meta])["info"])
