"""Functions of TensorDicts under torch.compile (eager backend), and a module that is exported."""

import torch
from tensordict import TensorDict, TensorDictParams, tensorclass
from torch import nn


@tensorclass
class Observation:
    position: torch.Tensor
    velocity: torch.Tensor


def step(td):
    td = td.clone(False)
    td["position"] = td["position"] + td["velocity"] * 0.5
    td["next", "reward"] = -td["position"].pow(2).sum(-1)
    return td.select("position", "velocity", ("next", "reward"))


def normalise(obs):
    return Observation(
        position=obs.position - obs.position.mean(0), velocity=obs.velocity / 2, batch_size=obs.batch_size
    )


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x, y):
        td = TensorDict({"x": x, "y": y}, batch_size=[])
        td["both"] = self.layer(td["x"]) + td["y"]
        return td["both"], td["x"].sum()


def main():
    td = TensorDict({"position": torch.ones(4, 2), "velocity": torch.arange(8.0).view(4, 2)}, [4])
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    want, got = step(td), compiled(td)
    print(type(got).__name__, got.batch_size, sorted(map(str, got.keys(True, True))), (want == got).all())
    print(compiled(td * 2)["next", "reward"].tolist())

    make = torch.compile(
        lambda x: TensorDict({"a": x, "b": {"c": x + 1}}, x.shape[:1]), backend="eager", fullgraph=True
    )
    made = make(torch.zeros(3, 2))
    print(made.batch_size, made["b", "c"].sum().item(), made["b"].batch_size)

    stack = torch.compile(lambda a, b: torch.stack([a, b], 1).sum(1), backend="eager", fullgraph=True)
    print(stack(td, td)["velocity"].tolist())
    obs = Observation(position=torch.rand(3, 2), velocity=torch.ones(3, 2), batch_size=[3])
    normal = torch.compile(normalise, backend="eager")(obs)
    print(type(normal).__name__, normal.position.mean(0).abs().max().item() < 1e-6, normal.velocity.unique().tolist())

    net = nn.Linear(2, 2)
    params = TensorDictParams(TensorDict.from_module(net).data.clone())

    def call(p, x):
        with p.to_module(net):
            return net(x)

    x = torch.ones(3, 2)
    print(torch.allclose(torch.compile(call, backend="eager")(params, x), call(params, x)))

    module = Wrapped()
    inputs = (torch.ones(4, 3), torch.zeros(4, 2))
    exported = torch.export.export(module, inputs)
    both, total = exported.module()(*inputs)
    print(torch.allclose(both, module(*inputs)[0]), total.item())
    names = [node.op for node in exported.graph.nodes]
    print(names.count("output"), sorted(exported.state_dict))
    indexed = torch.compile(lambda t: t[1:3].apply(lambda v: v + 1), backend="eager", fullgraph=True)(td)
    print(indexed.batch_size, indexed["position"].tolist())
