"""TensorDictParams in modules: registration, optimisers with groups, freezing, targets, moving and sharing."""

import torch
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import TensorDictParams as FromNN
from torch import nn


class Critic(nn.Module):
    def __init__(self, copies=2):
        super().__init__()
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        self.__dict__["net"] = net.to("meta")
        layers = TensorDict(
            {
                "0": {"weight": torch.full((copies, 4, 3), 0.1), "bias": torch.zeros(copies, 4)},
                "2": {"weight": torch.full((copies, 1, 4), 0.2), "bias": torch.zeros(copies, 1)},
            },
            [copies],
        )
        self.params = TensorDictParams(layers)
        self.target = TensorDictParams(self.params.data.clone(), no_convert=True)

    def forward(self, x, target=False):
        params = self.target if target else self.params

        def one(p):
            with p.to_module(self.net):
                return self.net(x)

        return torch.vmap(one)(params)

    def update_target(self, tau=0.5):
        self.target.data.lerp_(self.params.data, tau)


def main():
    print(FromNN is TensorDictParams)
    critic = Critic()
    print(sorted(name for name, _ in critic.named_parameters()))
    print(sorted(name for name, _ in critic.named_buffers()), len(critic.state_dict()))
    x = torch.ones(5, 3)
    print(
        critic(x).shape, round(critic(x)[0, 0].item(), 4), critic(x).requires_grad, critic(x, target=True).requires_grad
    )

    weights = [p for name, p in critic.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in critic.named_parameters() if name.endswith("bias")]
    optimiser = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.1}], lr=0.01)
    for _ in range(3):
        loss = (critic(x) - critic(x, target=True) - 1).pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    gap = (critic.params.data - critic.target.data)["2", "bias"]
    critic.update_target()
    print(gap.abs().min().item() > 0, torch.allclose((critic.params.data - critic.target.data)["2", "bias"], gap / 2))

    print(
        critic.params.is_locked,
        isinstance(critic.params, (nn.Module, TensorDictParams)),
        isinstance(critic.params, TensorDict),
    )
    try:
        critic.params["new"] = torch.zeros(2)
        print("set", type(critic.params["new"]).__name__)
        del critic.params["new"]
    except RuntimeError:
        print("locked")
    first = critic.params[0]
    print(first.batch_size, first["0", "weight"].shape, first["0", "weight"].requires_grad)
    print(
        type(critic.params["0"]).__name__,
        type(critic.params["0", "bias"]).__name__,
        type(critic.target["0", "bias"]).__name__,
    )
    frozen = TensorDictParams(
        TensorDict({"w": nn.Parameter(torch.ones(2)), "counter": nn.Buffer(torch.zeros(2)), "i": torch.arange(2)}, [])
    )
    print([type(frozen[k]).__name__ for k in ("w", "counter", "i")], len(list(frozen.parameters())))
    critic.requires_grad_(False)
    print(any(p.requires_grad for p in critic.parameters()), critic(x).requires_grad)
    critic.half()
    print(critic.params["2", "weight"].dtype, critic.target["2", "weight"].dtype)
    clone = critic.params.clone()
    print(type(clone).__name__, clone["0", "weight"].shape)
    shared = critic.params.data.share_memory_()
    print(shared.is_shared(), sorted(shared.keys()))
    print(sum(p.numel() for p in critic.params.parameters()), critic.params.numel())
    outer = nn.ModuleDict({"critic": critic})
    print(len(list(outer.parameters())), "critic.params.0.weight" in dict(outer.named_parameters()))
    doubled = critic.params.apply(lambda p: p.data * 2)
    print(type(doubled).__name__, doubled["0", "weight"].dtype)
