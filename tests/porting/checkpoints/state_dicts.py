"""state_dict and load_state_dict of TensorDicts, of classes and of modules that hold parameters as TensorDicts."""

import copy

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack, tensorclass
from torch import nn


@tensorclass
class Running:
    average: torch.Tensor
    count: torch.Tensor
    name: str = "stats"

    def update_with(self, batch):
        self.count = self.count + batch.shape[0]
        self.average = self.average + (batch - self.average).sum(0) / self.count
        return self


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        source = TensorDict(
            {"layer": {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, "scale": torch.ones(())}, []
        )
        self.params = TensorDictParams(source)
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        layer = self.params["layer"]
        return self.head(nn.functional.linear(x, layer["weight"], layer["bias"]) * self.params["scale"])


def main():
    td = TensorDict({"a": torch.arange(3), "n": {"b": torch.zeros(3, 2)}}, [3])
    state = td.state_dict()
    print(sorted(key for key in state if not key.startswith("_")), type(state).__name__)
    target = TensorDict({"a": torch.zeros(3, dtype=torch.int64), "n": {"b": torch.ones(3, 2)}}, [3])
    target.load_state_dict(state)
    print((target == td).all(), target.batch_size)
    try:
        TensorDict({"other": torch.zeros(3)}, [3]).load_state_dict(state)
    except Exception as error:
        print(isinstance(error, (RuntimeError, KeyError)))
    loose = TensorDict({"a": torch.zeros(3)}, [3])
    loose.load_state_dict(state, strict=False)
    print(loose["a"].tolist())

    stacked = lazy_stack([td, td + 1])
    other = lazy_stack([td * 0, td * 0])
    other.load_state_dict(stacked.state_dict())
    print(type(other).__name__, other["a"].tolist(), isinstance(other, LazyStackedTensorDict))

    stats = Running(average=torch.zeros(2), count=torch.zeros(()), batch_size=[])
    stats.update_with(torch.ones(4, 2) * 3)
    fresh = Running(average=torch.zeros(2), count=torch.zeros(()), name="none")
    fresh.load_state_dict(stats.state_dict())
    print(fresh.average.tolist(), fresh.count.item(), fresh.name)

    torch.manual_seed(0)
    policy = Policy()
    print(sorted(name for name, _ in policy.named_parameters()))
    print(sorted(policy.state_dict()), sum(p.numel() for p in policy.parameters()))
    optimiser = torch.optim.SGD(policy.parameters(), lr=0.1)
    x = torch.ones(5, 3)
    first = policy(x).pow(2).mean()
    first.backward()
    optimiser.step()
    print(policy(x).pow(2).mean() < first, policy.params["layer", "weight"].grad is not None)

    other = Policy()
    print(other.load_state_dict(policy.state_dict()))
    print(torch.equal(other(x), policy(x)), (other.params.data == policy.params.data).all())
    duplicate = copy.deepcopy(policy)
    with torch.no_grad():
        duplicate.params["scale"].zero_()
    print(policy.params["scale"].item() != 0, type(duplicate.params).__name__)
    frozen = policy.params.data
    print(type(frozen).__name__, frozen["layer", "bias"].requires_grad, policy.params.requires_grad)
    policy.double()
    print(policy.params["layer", "weight"].dtype, isinstance(policy.params["scale"], nn.Parameter))
    policy.zero_grad()
    print(policy.params["layer", "weight"].grad)
