"""Printing TensorDicts and classes for logs and notebooks, with options."""

from __future__ import annotations

import torch
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass
from tensordict.utils import get_printoptions, set_printoptions


@tensorclass
class Sample:
    image: torch.Tensor
    label: str
    info: TensorDict | None = None


class Logger:
    """Collects lines, in the way of experiment trackers."""

    def __init__(self):
        self.lines = []

    def log(self, td, prefix=""):
        for key, value in sorted(td.flatten_keys("/").items()):
            if value.numel() == 1:
                self.lines.append(f"{prefix}{key}={value.item():.3f}")
            else:
                self.lines.append(f"{prefix}{key}: {tuple(value.shape)} {value.dtype}")


def main():
    td = TensorDict(
        {"b": torch.zeros(3, 4, dtype=torch.float16), "a": {"deep": torch.ones(3, dtype=torch.bool)}, "text": "hello"},
        [3],
        names=["row"],
    )
    print(td)
    print(TensorDict(), TensorDict({}, [2, 3]))
    print(repr(td["a"]))
    print(td.exclude("text").to("cpu"))
    sample = Sample(image=torch.zeros(2, 2), label="cat", info=TensorDict({"x": torch.zeros(())}))
    print(sample)
    print(torch.stack([sample, sample]))
    print(lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (1, 2)]))
    print(NonTensorData("value", batch_size=[2]))
    print(td.clone().lock_())
    print(f"{td['b'].dtype} {td.shape} {td.batch_dims} {td.ndim}")

    before = get_printoptions()
    with set_printoptions(show_device=False, show_is_shared=False):
        print(td)
        print(get_printoptions() == before)
    with set_printoptions(show_shape=False):
        print(td["a"])
    print(get_printoptions() == before)

    logger = Logger()
    logger.log(
        TensorDict({"loss": {"actor": torch.tensor(0.5), "critic": torch.tensor(1.25)}, "grad": torch.zeros(3)}),
        "train/",
    )
    print(logger.lines)
    print(str(td) == repr(td), len(repr(td).splitlines()))
    long = TensorDict({f"key{i}": torch.zeros(1) for i in range(9)}, [1])
    print(long)
    nested = TensorDict({"a": {"b": {"c": {"d": torch.zeros(1)}}}})
    print(nested)
