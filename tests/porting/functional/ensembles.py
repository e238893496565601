"""An ensemble of networks as stacked parameters: vmap over them, training, and taking members out."""

import torch
from tensordict import TensorDict, TensorDictParams, from_module, from_modules
from torch import nn, vmap
from torch.func import functional_call


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def main():
    torch.manual_seed(3)
    members = [Regressor() for _ in range(4)]
    template = Regressor().to("meta")
    params = from_modules(*members, as_module=True)
    print(type(params).__name__, params.batch_size, sorted(map(str, params.keys(True, True))))
    print(params["body", "weight"].shape, isinstance(params["body", "weight"], nn.Parameter))

    def call(p, x):
        with p.to_module(template):
            return template(x)

    x = torch.linspace(-1, 1, 20).view(10, 2)
    y = x.pow(2).sum(-1, keepdim=True)
    out = vmap(call, (0, None))(params, x)
    single = torch.stack([net(x) for net in members])
    print(out.shape, torch.allclose(out, single, atol=1e-6))

    optimiser = torch.optim.Adam(params.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        loss = (vmap(call, (0, None))(params, x) - y).pow(2).mean((1, 2))
        optimiser.zero_grad()
        loss.sum().backward()
        optimiser.step()
        losses.append(loss.detach())
    print((losses[-1] < losses[0]).all().item(), losses[0].shape)
    print(sum(1 for _ in params.parameters()), [tuple(p.shape) for p in params.parameters()][:1])

    member = params.data[2]
    print(type(member).__name__, member.batch_size, member["head", "bias"].shape)
    with member.to_module(members[2]):
        inside = members[2](x)
    print(torch.allclose(inside, vmap(call, (0, None))(params, x)[2], atol=1e-6))
    print(torch.allclose(members[2](x), inside))
    flat = member.flatten_keys(".")
    by_torch = functional_call(members[0], flat.to_dict(), (x,))
    print(torch.allclose(by_torch, inside, atol=1e-6))

    mean = params.data.mean(0)
    spread = params.data.std(0)
    print(mean.batch_size, mean["body", "bias"].shape, bool(spread["head", "weight"].min() >= 0))
    best = losses[-1].argmin()
    elite = params.data[best].expand(4).clone()
    noise = elite.apply(lambda w: 0.01 * torch.ones_like(w))
    params.data.update_(elite + noise)
    print(torch.allclose(params["head", "bias"][0], params["head", "bias"][3]))
    td = TensorDict({"x": x, "member": torch.arange(10) % 4}, [10])
    chosen = vmap(call)(params.data[td["member"]], td["x"])
    print(chosen.shape)
    averaged = from_module(members[0]).data.lerp(from_module(members[1]).data, 0.5)
    print(averaged["body", "weight"].shape, isinstance(params, TensorDictParams))
