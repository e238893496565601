"""Gradients with respect to entries: requires_grad_, backward of sums, grad, detach, data, and descent by hand."""

import torch
from tensordict import TensorDict, tensorclass


@tensorclass
class Gaussian:
    loc: torch.Tensor
    log_std: torch.Tensor

    def rsample(self, noise):
        return self.loc + self.log_std.exp() * noise

    def kl(self, other):
        variance = (2 * (self.log_std - other.log_std)).exp()
        shift = ((self.loc - other.loc) / other.log_std.exp()) ** 2
        return (variance + shift - 1).sum(-1) / 2 - (self.log_std - other.log_std).sum(-1)


def main():
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.full((3, 2), 2.0)}}, [3]).requires_grad_()
    print(td.requires_grad, td["n", "b"].requires_grad, td["a"].is_leaf)
    loss = (td["a"].sum() ** 2) + td["n", "b"].prod()
    loss.backward()
    print(td.grad["a"].tolist(), td.grad["n", "b"].unique().tolist(), td.grad.batch_size)
    with torch.no_grad():
        td.data.add_(td.grad, alpha=-0.1)
    print([round(x, 3) for x in td["a"].tolist()], td["a"].requires_grad)
    print(td.detach().requires_grad, td.data.requires_grad, td.requires_grad)
    td.zero_grad()
    print(td.grad is None or td.grad.is_empty() or all(g is None for g in td.grad.values(True, True)))

    squares = td**2
    print(squares["a"].requires_grad, squares["a"].grad_fn is not None)
    total = squares.sum(reduce=True)
    total.backward()
    print(torch.allclose(td.grad["n", "b"], 2 * td["n", "b"].detach()), total.ndim)

    q = Gaussian(loc=torch.zeros(2, 3), log_std=torch.zeros(2, 3), batch_size=[2]).requires_grad_()
    prior = Gaussian(loc=torch.ones(2, 3), log_std=torch.full((2, 3), -0.5), batch_size=[2])
    optimiser = torch.optim.SGD([q.loc, q.log_std], lr=0.1)
    values = []
    for _ in range(20):
        kl = q.kl(prior).mean()
        optimiser.zero_grad()
        kl.backward()
        optimiser.step()
        values.append(kl.item())
    print(values[-1] < values[0], type(q.grad).__name__, q.grad.loc.shape, q.batch_size)
    sample = q.rsample(torch.zeros(2, 3))
    print(sample.requires_grad, q.detach().rsample(torch.zeros(2, 3)).requires_grad)
    print(prior.kl(prior).tolist())
    expected = torch.autograd.grad(td["a"].pow(3).sum(), td["a"])[0]
    print(torch.allclose(expected, 3 * td["a"].detach() ** 2))
    copied = td.clone()
    print(copied["a"].requires_grad, copied["a"].is_leaf, td.detach().clone()["a"].is_leaf)
    rows = td[:2]
    rows["a"].sum().backward()
    print(rows.batch_size, td.grad["a"].shape)
