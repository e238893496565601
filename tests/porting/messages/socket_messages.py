"""Messages of a service: fields with names such as data, open, close, read, append, fields and commit."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorClass, TensorDict, tensorclass


@tensorclass
class Frame:
    data: torch.Tensor
    fields: str = ""
    commit: torch.Tensor | None = None


@tensorclass
class Candle:
    open: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor
    close: torch.Tensor

    @property
    def body(self):
        return (self.close - self.open).abs()

    def resampled(self, size):
        grouped = self.reshape(-1, size)
        return Candle(
            open=grouped.open[:, 0],
            high=grouped.high.amax(1),
            low=grouped.low.amin(1),
            close=grouped.close[:, -1],
            batch_size=[grouped.shape[0]],
        )


class Event(TensorClass["nocast"]):
    data: Any
    read: bool = False
    append: int = 0
    location: str = "nowhere"
    header: dict | None = None


@tensorclass
class Payload:
    data: TensorDict
    header: torch.Tensor
    store: torch.Tensor


def main():
    frame = Frame(data=torch.arange(6).view(3, 2), fields="x,y", batch_size=[3])
    print(frame.data.tolist(), frame.fields, frame.commit, frame[1].data.tolist())
    frame.data = frame.data * 2
    frame.commit = torch.zeros(3)
    print(frame.data.sum().item(), frame.commit.shape, frame.get("data").shape)
    frame.data += 1
    print(frame[:2].data.tolist(), torch.stack([frame, frame]).data.shape)
    print(frame.to_tensordict()["data"].tolist(), sorted(frame.to_dict()))

    time = torch.arange(8).float()
    candles = Candle(open=time, high=time + 2, low=time - 1, close=time + 1, batch_size=[8])
    print(candles.body.tolist(), candles[3].close.item(), candles.open[:2].tolist())
    coarse = candles.resampled(4)
    print(type(coarse).__name__, coarse.open.tolist(), coarse.high.tolist(), coarse.low.tolist(), coarse.close.tolist())
    path = candles.memmap("candles")
    print(path.is_memmap(), Candle.load_memmap("candles").close.tolist())
    candles.close[0] = -5.0
    print(candles.close.min().item(), candles[candles.open > 5].shape)
    print(TensorDict({"day": candles}, [8])["day"].open.shape)

    event = Event(data={"kind": "click"}, location="here", header={"id": 3})
    print(event.data is not None, event.read, event.append, event.location, event.header)
    event.read = True
    event.append = event.append + 1
    print(event.read, event.append, type(event).__name__)
    other = event.clone()
    other.location = "there"
    print(event.location, other.location, other.data is not None)

    payload = Payload(
        data=TensorDict({"a": torch.ones(2, 3)}, [2]), header=torch.zeros(2), store=torch.ones(2, 1), batch_size=[2]
    )
    print(payload.data["a"].shape, payload.header.tolist(), payload[0].store.item(), payload.data.batch_size)
    print((payload + 1).data["a"].sum().item(), payload.apply(lambda x: x * 2).store.tolist())
    print(repr(payload[0]))
