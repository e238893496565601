"""A training run whose weights, optimiser state and counters are saved through TensorDicts and resumed."""

import io
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn


def build():
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return net, torch.optim.Adam(net.parameters(), lr=1e-2)


def train(net, optimiser, steps, seed):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 4, generator=rng)
        loss = (net(x) - x.sum(-1, keepdim=True)).pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return loss.item()


def checkpoint(net, optimiser, step):
    weights = TensorDict(net.state_dict(), batch_size=[]).unflatten_keys(".")
    moments = TensorDict(
        {str(i): {k: v for k, v in state.items()} for i, state in optimiser.state_dict()["state"].items()}, []
    )
    return TensorDict({"weights": weights, "moments": moments, "step": torch.tensor(step)}, [])


def restore(td, net, optimiser):
    net.load_state_dict(dict(td["weights"].flatten_keys(".").items()))
    state = optimiser.state_dict()
    state["state"] = {int(i): moment.to_dict() for i, moment in td["moments"].items()}
    optimiser.load_state_dict(state)
    return td["step"].item()


def main():
    net, optimiser = build()
    train(net, optimiser, 10, seed=1)
    saved = checkpoint(net, optimiser, 10)
    print(sorted(saved.keys()), sorted(saved["weights"].keys()), sorted(saved["moments", "0"].keys()))
    print(sorted(saved["weights", "2"].keys()), saved["weights", "2", "num_batches_tracked"].item())

    on_disk = saved.memmap("checkpoint")
    print(on_disk.is_memmap(), on_disk["step"].item(), Path("checkpoint").is_dir())
    reference = train(net, optimiser, 5, seed=2)

    resumed, resumed_optimiser = build()
    step = restore(TensorDict.load_memmap("checkpoint"), resumed, resumed_optimiser)
    print(step, abs(train(resumed, resumed_optimiser, 5, seed=2) - reference) < 1e-6)

    buffer = io.BytesIO()
    torch.save(saved.to_dict(), buffer)
    buffer.seek(0)
    plain = torch.load(buffer, weights_only=True)
    again = TensorDict(plain, [])
    print((again == saved).all(), again["moments"].batch_size)

    before = TensorDict.from_module(net).data.clone()
    train(net, optimiser, 1, seed=3)
    after = TensorDict.from_module(net).data
    change = (after - before).abs()
    largest = max(change.values(True, True), key=lambda x: x.max())
    print(largest.ndim >= 0, bool(torch.stack([x.max() for x in change.values(True, True)]).max() > 0))
    norms = {k: v.shape for k, v in sorted(after.flatten_keys(".").items())}
    print({k: tuple(v) for k, v in norms.items()})
    before.to_module(net)
    print(
        all(
            (a == b).all().item()
            for a, b in zip(before.values(True, True), TensorDict.from_module(net).values(True, True), strict=True)
        )
    )
    print(isinstance(net[0].weight, nn.Parameter), sorted(net.state_dict()) == sorted(build()[0].state_dict()))
