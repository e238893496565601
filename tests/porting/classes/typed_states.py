"""States of a simulation as classes that are TensorDicts with declared entries, and as plain tensorclasses."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TypedTensorDict, from_dict, is_tensor_collection, tensorclass


class State(TypedTensorDict):
    position: torch.Tensor
    velocity: torch.Tensor


class Charged(State):
    charge: torch.Tensor


@tensorclass
class Energy:
    kinetic: torch.Tensor
    potential: torch.Tensor

    def total(self):
        return self.kinetic + self.potential


def accelerate(state: State, dt: float) -> State:
    return State(
        position=state.position + dt * state.velocity,
        velocity=state.velocity - dt * state.position,
        batch_size=state.batch_size,
    )


def energy(state) -> Energy:
    return Energy(
        kinetic=state["velocity"].square().sum(-1) / 2,
        potential=state["position"].square().sum(-1) / 2,
        batch_size=state.batch_size,
    )


def main():
    state = State(position=torch.tensor([[1.0, 0.0], [0.0, 2.0]]), velocity=torch.zeros(2, 2), batch_size=[2])
    print(type(state).__name__, state.batch_size, isinstance(state, TypedTensorDict), is_tensor_collection(state))
    print(state["position"].tolist(), state.position is state["position"], sorted(state.keys()))
    energies = []
    for _ in range(50):
        state = accelerate(state, 0.01)
        energies.append(energy(state))
    stacked = torch.stack(energies)
    print(type(stacked).__name__, stacked.shape, stacked.total().shape)
    drift = stacked.total()[-1] / stacked.total()[0]
    print([round(x, 3) for x in drift.tolist()])

    charged = Charged(position=torch.zeros(3, 2), velocity=torch.ones(3, 2), charge=torch.ones(3, 1), batch_size=[3])
    print(isinstance(charged, State), charged[1].charge.item(), type(charged[:2]).__name__)
    charged.charge = charged.charge * -1
    print(charged["charge"].sum().item(), sorted(charged.keys()))
    try:
        State(position=torch.zeros(2, 2), batch_size=[2])
    except (TypeError, KeyError, ValueError):
        print("velocity is missing")
    halves = charged.apply(lambda x: x / 2)
    print(halves["velocity"].unique().tolist())
    both = torch.cat([charged, charged])
    print(both.batch_size, both["position"].shape)
    print((charged == charged.clone()).all(), charged.sum()["velocity"].item())

    td = from_dict({"step": 3, "nested": {"rate": 0.5, "grid": [[1, 2], [3, 4]]}})
    print(
        type(td).__name__,
        td.batch_size,
        td["nested", "grid"] if isinstance(td["nested", "grid"], list) else td["nested", "grid"].tolist(),
    )
    outer = TensorDict({"state": charged, "energy": energy(charged)}, [3])
    print(outer["energy"].total().tolist(), outer["state", "velocity"].shape, type(outer[0]["energy"]).__name__)
    rows = [row["energy"].kinetic.item() for row in outer.unbind(0)]
    print(rows)
