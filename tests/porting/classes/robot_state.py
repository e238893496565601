"""Poses, joints and commands of robots: nested tensorclasses with maths, batching over robots and over time."""

from __future__ import annotations

import torch
from tensordict import TensorClass, TensorDict, lazy_stack, tensorclass


@tensorclass
class Pose:
    position: torch.Tensor  # [..., 3]
    quaternion: torch.Tensor  # [..., 4], w first

    @classmethod
    def identity(cls, *shape):
        quaternion = torch.zeros(*shape, 4)
        quaternion[..., 0] = 1
        return cls(position=torch.zeros(*shape, 3), quaternion=quaternion, batch_size=shape)

    def rotate(self, vector):
        w, v = self.quaternion[..., :1], self.quaternion[..., 1:]
        t = 2 * torch.linalg.cross(v, vector)
        return vector + w * t + torch.linalg.cross(v, t)

    def __matmul__(self, other):
        aw, av = self.quaternion[..., :1], self.quaternion[..., 1:]
        bw, bv = other.quaternion[..., :1], other.quaternion[..., 1:]
        w = aw * bw - (av * bv).sum(-1, keepdim=True)
        v = aw * bv + bw * av + torch.linalg.cross(av, bv)
        return Pose(
            position=self.position + self.rotate(other.position),
            quaternion=torch.cat([w, v], -1),
            batch_size=torch.broadcast_shapes(self.batch_size, other.batch_size),
        )

    def normalised(self):
        return self.replace(quaternion=self.quaternion / self.quaternion.norm(dim=-1, keepdim=True))


class Robot(TensorClass):
    base: Pose
    joints: TensorDict
    battery: torch.Tensor
    model: str = "arm"

    def step(self, command, dt=0.1):
        joints = self.joints.clone()
        joints["velocity"] = command
        joints["angle"] = joints["angle"] + dt * command
        half = torch.full((), dt / 2)
        turn = Pose(
            position=torch.tensor([dt, 0.0, 0.0]).expand(*self.batch_size, 3),
            quaternion=torch.stack([half.cos(), half * 0, half * 0, half.sin()]).expand(*self.batch_size, 4),
            batch_size=self.batch_size,
        )
        return Robot(
            base=(self.base @ turn).normalised(),
            joints=joints,
            battery=self.battery - command.abs().sum(-1, keepdim=True) * dt,
            model=self.model,
            batch_size=self.batch_size,
        )


def fleet(n):
    joints = TensorDict({"angle": torch.zeros(n, 2), "velocity": torch.zeros(n, 2)}, [n])
    return Robot(base=Pose.identity(n), joints=joints, battery=torch.ones(n, 1), batch_size=[n])


def main():
    robots = fleet(3)
    print(type(robots.base).__name__, robots.base.batch_size, robots.model, robots.joints["angle"].shape)
    history = [robots]
    for t in range(5):
        command = torch.tensor([[0.1 * t, 0.2], [0.0, 0.0], [-0.1, 0.1 * t]])
        history.append(history[-1].step(command))
    trajectory = torch.stack(history, dim=1)
    print(type(trajectory).__name__, trajectory.batch_size, trajectory.base.position.shape)
    print([[round(x, 4) for x in row] for row in trajectory.base.position[0].tolist()])
    print([round(x, 4) for x in trajectory.battery[:, -1, 0].tolist()])
    print(trajectory.base.quaternion.norm(dim=-1).sub(1).abs().max().item() < 1e-6)
    last = trajectory[:, -1]
    print(type(last).__name__, last.shape, last[0].joints["angle"].tolist() == history[-1].joints["angle"][0].tolist())

    relative = trajectory.base[:, 1:] - trajectory.base[:, :-1]
    print(type(relative).__name__, relative.batch_size, round(relative.position.norm(dim=-1).mean().item(), 5))
    moving = trajectory[trajectory.joints["velocity"].abs().sum(-1) > 0.25]
    print(moving.batch_size, moving.model, moving.base.position.ndim)
    trajectory.battery.clamp_(min=0.9)
    print(round(trajectory.battery.min().item(), 3))
    robots.base.position[1] = torch.tensor([1.0, 2.0, 3.0])
    robots[2] = robots[1]
    print(robots.base.position.tolist())

    mixed = lazy_stack(
        [
            fleet(2)[0],
            Robot(
                base=Pose.identity(), joints=TensorDict({"angle": torch.zeros(5)}), battery=torch.ones(1), model="legs"
            ),
        ]
    )
    print(mixed.batch_size, mixed[1].model, mixed[1].joints["angle"].shape, mixed.battery.shape)
    flat = trajectory.reshape(-1)
    print(flat.batch_size, flat.base.batch_size, flat.to_tensordict()["base", "position"].shape)
    floats = flat.double()
    print(floats.base.position.dtype, type(floats).__name__, floats.model)
    try:
        Pose(position=torch.zeros(3), quaternion=torch.zeros(4), batch_size=[2])
    except RuntimeError:
        print("batch size does not fit")
