"""Jacobians, Hessians and linearised dynamics of functions that take and give TensorDicts."""

import torch
from tensordict import TensorDict
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap


def dynamics(state):
    angle, speed = state["angle"], state["speed"]
    return TensorDict({"angle": angle + 0.1 * speed, "speed": speed - 0.1 * torch.sin(angle)}, state.batch_size)


def energy(state):
    return (state["speed"] ** 2 / 2 - torch.cos(state["angle"])).sum()


def rounded(tensor):
    return torch.round(tensor * 1000).div(1000).tolist()


def main():
    state = TensorDict({"angle": torch.tensor([0.3, -0.2]), "speed": torch.tensor([1.0, 0.0])}, [])
    jacobian = jacrev(dynamics)(state)
    print(type(jacobian).__name__, jacobian.batch_size, jacobian["angle", "speed"].shape)
    print(rounded(jacobian["speed", "angle"]), rounded(jacobian["angle", "angle"]))
    forward = jacfwd(dynamics)(state)
    print(torch.allclose(forward["speed", "angle"], jacobian["speed", "angle"]))

    gradient = grad(energy)(state)
    print(sorted(gradient.keys()), rounded(gradient["angle"]), rounded(gradient["speed"]))
    second = hessian(energy)(state)
    print(second["speed", "speed"].tolist(), rounded(second["angle", "angle"]))

    batched = TensorDict({"angle": torch.linspace(-1, 1, 4), "speed": torch.ones(4)}, [4])
    per_row = vmap(jacrev(dynamics))(batched)
    print(per_row.batch_size, per_row["speed", "angle"].shape, rounded(per_row["speed", "angle"]))
    following = vmap(dynamics)(batched)
    print(
        type(following).__name__, following.batch_size, torch.allclose(following["angle"], dynamics(batched)["angle"])
    )
    gains = vmap(grad(energy))(batched)
    print(gains.batch_size, rounded(gains["angle"]))

    steps = [batched]
    for _ in range(10):
        steps.append(dynamics(steps[-1]))
    path = torch.stack(steps, 1)
    print(path.batch_size, rounded(path["angle"][:, -1]))
    value, pull = vjp(energy, state)
    (back,) = pull(torch.ones(()))
    print(round(value.item(), 4), torch.allclose(back["angle"], gradient["angle"]))
    tangent = TensorDict({"angle": torch.ones(2), "speed": torch.zeros(2)}, [])
    _, change = jvp(energy, (state,), (tangent,))
    print(torch.allclose(change, gradient["angle"].sum()))
    with_aux = jacrev(lambda s: (dynamics(s), s["angle"].sum()), has_aux=True)(state)
    print(len(with_aux), with_aux[0]["angle", "speed"].shape, round(with_aux[1].item(), 4))
