"""Inner steps by arithmetic on parameters, gradients through torch.func, EMA targets and checks of norms."""

import torch
from tensordict import TensorDict, from_module
from torch import nn
from torch.func import grad, vmap


def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))


def main():
    net = make()
    params = from_module(net)
    print(params.batch_size, params.is_locked, sorted(map(str, params.keys(True, True))))

    def loss_fn(p, x, y):
        with p.to_module(net):
            return (net(x) - y).pow(2).mean()

    x = torch.linspace(-1, 1, 8)[:, None]
    tasks = TensorDict({"x": x.expand(3, 8, 1), "y": torch.stack([x * k for k in (1.0, 2.0, -1.0)])}, [3])

    start = params.data.clone()
    gradient = grad(loss_fn)(start, x, tasks["y"][0])
    print(type(gradient).__name__, sorted(gradient.keys()), gradient["0", "weight"].shape)

    def adapt(p, x, y, rate=0.1, steps=2):
        for _ in range(steps):
            p = p.apply(lambda w, g: w - rate * g, grad(loss_fn)(p, x, y))
        return p

    before = [loss_fn(start, t["x"], t["y"]).item() for t in tasks.unbind(0)]
    after = [loss_fn(adapt(start, t["x"], t["y"]), t["x"], t["y"]).item() for t in tasks.unbind(0)]
    print(all(b < a for a, b in zip(before, after, strict=True)), [round(b, 3) for b in before][:1])

    adapted = vmap(lambda x, y: adapt(start, x, y))(tasks["x"], tasks["y"])
    print(adapted.batch_size, adapted["2", "weight"].shape)

    def outer(p):
        return torch.stack([loss_fn(adapt(p, t["x"], t["y"]), t["x"], t["y"]) for t in tasks.unbind(0)]).mean()

    meta = grad(outer)(start)
    norm = torch.sqrt(sum(g.pow(2).sum() for g in meta.values(True, True)))
    print(norm.item() > 0, meta.batch_size)

    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = outer(params)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(losses[-1] < losses[0])
    grads = params.grad
    print(sorted(grads.keys()) == sorted(params.keys()), grads["0", "bias"].shape)

    target = params.data.clone()
    for _ in range(3):
        target.lerp_(params.data + 1, 0.5)
    print(round((target - params.data)["2", "bias"].item(), 4))
    clipped = grads.clamp(-0.01, 0.01)
    print(max(g.abs().max().item() for g in clipped.values(True, True)) <= 0.0101)
    total = params.data.apply(lambda w: w.pow(2).sum()).sum(reduce=True)
    print(total.ndim, total.item() > 0)
    with torch.zeros_like(params.data).to_module(net):
        print(net(x).abs().sum().item())
    print(net(x).abs().sum().item() > 0)
    scaled = 2 * params.data / 2 + 0
    print(
        all(
            torch.allclose(a, b) for a, b in zip(scaled.values(True, True), params.data.values(True, True), strict=True)
        )
    )
