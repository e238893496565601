"""Moving and casting: to, devices, dtypes, contiguous memory, storage sharing, sizes in bytes."""

import torch
from tensordict import TensorDict, lazy_stack, tensorclass
from torch import nn


@tensorclass
class Frame:
    image: torch.Tensor
    mask: torch.Tensor
    source: str = "camera"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, td):
        return td.set("out", self.layer(td["x"]) * self.scale)


def main():
    td = TensorDict({"x": torch.ones(3, 2), "n": {"i": torch.arange(3)}, "text": "t"}, [3])
    print(td.device, td.to("cpu").device, td.to(torch.device("cpu"))["n"].device, td.cpu().device)
    placed = TensorDict({"x": torch.ones(3, 2)}, [3], device="cpu")
    placed["y"] = torch.zeros(3)
    print(placed.device, placed["y"].device, placed.clear_device_().device)
    print(
        td.float()["n", "i"].dtype,
        td.double()["x"].dtype,
        td.bool()["x"].dtype,
        td.int()["x"].dtype,
        td.half()["x"].dtype,
    )
    print(td.to(torch.bfloat16)["n", "i"].dtype, td.to(dtype=torch.float64)["text"], td.type(torch.float16)["x"].dtype)
    print(td.dtype, td.select("x").dtype, td.to("meta")["x"].device, td.to("meta").device)

    frame = Frame(
        image=torch.zeros(2, 4, 4, dtype=torch.uint8), mask=torch.ones(2, 4, 4, dtype=torch.bool), batch_size=[2]
    )
    print(frame.to("cpu").device, frame.float().image.dtype, frame.to(torch.float32).source, frame.bytes())
    print(td.exclude("text").bytes(), td.numel(), td.exclude("text").clone().bytes())

    strided = TensorDict({"a": torch.arange(12).view(3, 4).t()}, [4])
    print(strided.is_contiguous(), strided.contiguous().is_contiguous(), strided["a"].stride())
    a, b = td.view(3), td.clone()
    print(a["x"].data_ptr() == td["x"].data_ptr(), b["x"].data_ptr() == td["x"].data_ptr())
    lazy = lazy_stack([td[0], td[1]])
    print(lazy.to(torch.float64)["x"].dtype, lazy.device, lazy.to("cpu").device, lazy.contiguous()["x"].shape)

    model = Model()
    with torch.no_grad():
        model.layer.weight.copy_(torch.eye(2))
        model.layer.bias.zero_()
    out = model(td)
    print(out is td, td["out"].tolist(), td["out"].requires_grad)
    detached = td.detach()
    print(detached["out"].requires_grad, td["out"].requires_grad, sorted(detached.keys()))
    params = TensorDict.from_module(model)
    print(sorted(params.keys()), type(params["scale"]).__name__, params.to(torch.float16)["layer", "weight"].dtype)
    print(sum(v.numel() for v in params.values(True, True)), params.data.float()["layer", "bias"].tolist())
    ones, zeros, random = (
        torch.ones_like(td.exclude("text")),
        torch.zeros_like(td.exclude("text")),
        torch.rand_like(td.select("x")),
    )
    print(
        ones["n", "i"].tolist(), zeros["x"].sum().item(), random["x"].shape, torch.empty_like(td.select("x")).batch_size
    )
    copied = zeros.clone().copy_(ones)
    print(copied["x"].sum().item(), td.pin_memory().is_pinned() if torch.cuda.is_available() else "no accelerator")
    filled = TensorDict({"x": torch.empty(2, 2)}, [2]).fill_("x", 3.0)
    print(filled["x"].tolist(), filled.data["x"].requires_grad, filled.is_shared(), filled.is_memmap())
