"""Learn CartPole from a replay buffer in any place, through a `kill -9` in the middle.

    python examples/dqn_cartpole.py --storage memmap
    python examples/dqn_cartpole.py --storage h5        (zarr, shared)
    python examples/dqn_cartpole.py --storage redis://localhost:6379/0/cartpole
    python examples/dqn_cartpole.py --storage s3://bucket/cartpole --options '{"key": "me", "secret": "..."}'
    python examples/dqn_cartpole.py --resume            (after a kill from outside, or with a higher --goal)

A worker process plays, writes its steps into the buffer, and learns from it. In the middle it is killed. The rows
that it had committed are then looked for and checked, and a second worker goes on from them and from the last
checkpoint, until the mean return of the last 20 episodes is above the goal. `returns.html` shows the return of each
episode. The exit code is 1 if a committed row was lost or the goal was not reached.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import tdstore
from tdstore import TensorDict
from tdstore.rl.buffers import TensorDictReplayBuffer
from tdstore.rl.storages import LazyStorage

ENVS = 16
BLOCK = 16
"""Steps of all environments between two writes; one write and one read a block, however far the rows are away."""
BATCH, UPDATES = 128, 64
CAPACITY = 20_000
GAMMA, TAU, RATE = 0.99, 0.01, 1e-3
EXPLORE = 6_000
"""Rows over which the share of random actions goes down to a twentieth."""
SUFFIXES = {"h5": ".h5", "zarr": ".zarr"}


# -- places ------------------------------------------------------------------------------------
def place_of(args: argparse.Namespace) -> tuple[str, str | None, dict[str, Any]]:
    """Return where the rows are: a path or URL, the name of the backend for a path, and its options."""
    if "://" in args.storage:
        return args.storage, None, {"storage_options": json.loads(args.options)} if args.options else {}
    if args.storage == "shared":
        return f"shm://cartpole-{args.out.resolve().name}-{os.getuid()}", None, {}
    return str(args.out / f"replay{SUFFIXES.get(args.storage, '')}"), args.storage, {}


def open_rows(args: argparse.Namespace) -> LazyStorage:
    """Open the rows that `make_room` made, with what workers wrote."""
    place, storage, options = place_of(args)
    return LazyStorage.open(place, storage=storage, **options)


def make_room(args: argparse.Namespace) -> LazyStorage:
    """Make room for rows, and return the storage, which is empty."""
    place, storage, options = place_of(args)
    where: dict[str, Any] = {"storage": place} if storage is None else {"storage": storage, "path": place}
    made = LazyStorage(CAPACITY, **where, auto_cleanup=False, **options)
    nowhere = np.zeros((1, 4), np.float32)
    made.append(rows_of(nowhere, np.zeros(1, np.int64), nowhere, np.zeros(1), np.zeros(1, bool), 0))
    made.empty()
    return made


def rows_of(here: Any, action: Any, after: Any, reward: Any, terminated: Any, first: int) -> TensorDict:
    """Return steps as rows, numbered from `first` on, each with a checksum."""
    count = [len(here)]
    following = {
        "observation": torch.from_numpy(after),
        "reward": torch.from_numpy(reward).float(),
        "terminated": torch.from_numpy(terminated),
    }
    found = {
        "observation": torch.from_numpy(here),
        "action": torch.from_numpy(action),
        "next": TensorDict(following, count),
        "id": torch.arange(first, first + len(here)),
    }
    rows = TensorDict(found, count)
    rows["checksum"] = checksum(rows)
    return rows


def checksum(rows: TensorDict) -> Tensor:
    """Return a number for each row that depends on all of it."""
    parts = (rows["observation"], rows["next"]["observation"], rows["action"].unsqueeze(-1), rows["id"].unsqueeze(-1))
    return torch.cat([part.double() for part in parts], -1).mul(torch.arange(1.0, 11.0, dtype=torch.float64)).sum(-1)


# -- learning ----------------------------------------------------------------------------------
class Learner:
    """A network, what it is compared to, and how it changes."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        self.target = copy.deepcopy(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=RATE)
        self.returns: list[tuple[int, float]] = []
        """Rows that were written, and the return, at the end of each episode."""

    def act(self, observation: np.ndarray[Any, Any], random_share: float) -> np.ndarray[Any, Any]:
        """Choose an action for each environment."""
        with torch.no_grad():
            best = self.net(torch.from_numpy(observation)).argmax(-1).numpy()
        chance = np.random.random(len(best)) < random_share
        return np.where(chance, np.random.randint(0, 2, len(best)), best)

    def learn(self, batch: TensorDict) -> None:
        """Make one step of double Q-learning."""
        after = batch["next"]
        with torch.no_grad():
            best = self.net(after["observation"]).argmax(-1, keepdim=True)
            value = self.target(after["observation"]).gather(-1, best).squeeze(-1)
            wanted = after["reward"] + GAMMA * value * ~after["terminated"]
        found = self.net(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        self.optimizer.zero_grad()
        nn.functional.smooth_l1_loss(found, wanted).backward()
        self.optimizer.step()
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, TAU)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, which is there as a whole or not at all."""
        found = {
            "net": TensorDict.from_module(self.net).detach(),
            "target": TensorDict.from_module(self.target).detach(),
            "optimizer": TensorDict.from_optimizer(self.optimizer),
            "returns": torch.tensor(self.returns, dtype=torch.float64).reshape(-1, 2),
        }
        TensorDict(found).save(folder).close()

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        with tdstore.open(folder) as found:
            found["net"].clone().to_module(self.net, inplace=True)
            found["target"].clone().to_module(self.target, inplace=True)
            found["optimizer"].clone().to_optimizer(self.optimizer)
            self.returns = [(int(rows), value) for rows, value in found["returns"].tolist()]

    def mean_return(self) -> float:
        """Return the mean return of the last 20 episodes."""
        last = [value for _, value in self.returns[-20:]]
        return sum(last) / max(len(last), 20)


def work(args: argparse.Namespace) -> None:
    """Play, write and learn until the goal is reached, and say on standard output what is committed."""
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    torch.set_num_threads(1)
    learner, checkpoint = Learner(), args.out / "checkpoint"
    if checkpoint.exists():
        learner.load(checkpoint)
    storage = open_rows(args)
    buffer = TensorDictReplayBuffer(storage=storage)
    envs = gymnasium.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="vector_entry_point")
    observation, _ = envs.reset(seed=args.seed + buffer.write_count)
    over = np.zeros(ENVS, bool)
    totals = np.zeros(ENVS)
    while buffer.write_count < args.rows and learner.mean_return() < args.goal:
        written = rows = buffer.write_count
        steps = []
        for _ in range(BLOCK):
            action = learner.act(observation, max(0.05, 1 - written / EXPLORE))
            following, reward, terminated, truncated, _ = envs.step(action)
            played = ~over  # the step after the last one of an episode only begins the next
            steps.append([column[played] for column in (observation, action, following, reward, terminated)])
            rows += int(played.sum())
            totals += reward * played
            over = (terminated | truncated) & played
            for total in totals[over]:
                learner.returns.append((rows, float(total)))
            totals[over] = 0
            observation = following
        here, taken, after, earned, ended = (np.concatenate(column) for column in zip(*steps, strict=True))
        block = rows_of(here, taken, after, earned, ended, written)
        buffer.extend(block)
        storage.flush()
        print(json.dumps({"committed": buffer.write_count, "return": learner.mean_return()}), flush=True)
        if len(buffer) >= 1000:
            for batch in buffer.sample(BATCH * UPDATES).split(BATCH):
                learner.learn(batch)
        learner.save(checkpoint)
    storage.close()


# -- watching ----------------------------------------------------------------------------------
def watch(args: argparse.Namespace, bar: Any, kill_at: int | None) -> int:
    """Run a worker, kill it once it has committed so many rows, and return how many it had committed."""
    command = [sys.executable, __file__, "--work", *sys.argv[1:]]
    committed = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            said = json.loads(line)
            committed = said["committed"]
            bar.update(committed - bar.n)
            bar.set_postfix({"return": f"{said['return']:.0f}"})
            if kill_at is not None and committed >= kill_at:
                time.sleep(0.002 * (committed % 7))  # anywhere in what it does next
                worker.send_signal(signal.SIGKILL)
                break
    if kill_at is None and worker.returncode:
        raise SystemExit(f"the worker ended with {worker.returncode}")
    return int(committed)


def check(args: argparse.Namespace, committed: int) -> tuple[int, int]:
    """Return how many rows are there after a kill, and how many are lost or damaged."""
    storage = open_rows(args)
    rows = storage.get(slice(None)).clone()
    damaged = int((rows["checksum"] != checksum(rows)).sum())
    lost = max(0, committed - storage.write_count)
    lost += len(set(range(max(0, committed - CAPACITY), committed)) - set(rows["id"].tolist())) * (committed < CAPACITY)
    storage.close()
    return len(rows), lost + damaged


def draw(returns: list[tuple[int, float]], killed: int, goal: float, path: Path) -> None:
    """Draw the return of each episode over the rows written."""
    import plotly.graph_objects as graphs

    recent: collections.deque[float] = collections.deque(maxlen=20)
    means = []
    for _, value in returns:
        recent.append(value)
        means.append(sum(recent) / len(recent))
    steps = [rows for rows, _ in returns]
    dots = graphs.Scatter(x=steps, y=[value for _, value in returns], mode="markers", name="episode", opacity=0.4)
    line = graphs.Scatter(x=steps, y=means, mode="lines", name="mean of 20")
    figure = graphs.Figure([dots, line])
    figure.add_vline(x=killed, line_dash="dash", annotation_text="goes on", annotation_position="top right")
    figure.add_hline(y=goal, line_dash="dot", annotation_text="goal", annotation_position="top right")
    figure.update_layout(title="CartPole: return of each episode", xaxis_title="rows written", yaxis_title="return")
    figure.write_html(path, include_plotlyjs="directory")


def main() -> int:
    """Learn through a kill, check, draw; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="memmap", help="memmap, h5, zarr, shared, or a URL")
    parser.add_argument("--options", metavar="JSON", help="storage_options of a bucket")
    parser.add_argument("--rows", type=int, default=60_000, help="give up after so many")
    parser.add_argument("--goal", type=float, default=175.0, help="mean return of 20 episodes")
    parser.add_argument("--kill-at", type=int, default=4_000, help="kill the worker after so many rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-data/dqn_cartpole"))
    parser.add_argument("--resume", action="store_true", help="go on with the rows and the checkpoint of another run")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.work:
        work(args)
        return 0
    if (args.out / "checkpoint").exists() and not args.resume:
        parser.error(f"{args.out} has the checkpoint of another run: pass --resume, remove it, or choose another --out")
    if args.resume and args.storage == "shared":
        parser.error("shared memory is gone with the process that made it: there is nothing to --resume")

    room = None if args.resume else make_room(args)
    if room is not None and args.storage != "shared":  # shared memory is there as long as the process that made it
        room.close()
    with tqdm(total=args.rows, unit="row", desc=args.storage, dynamic_ncols=True) as bar:
        committed = 0 if args.resume else watch(args, bar, args.kill_at)
        found, lost = check(args, committed)
        before = "resumed" if args.resume else f"killed after {committed} committed rows"
        bar.write(f"{before}: {found} are there and whole, {lost} are lost")
        watch(args, bar, None)
    learner = Learner()
    learner.load(args.out / "checkpoint")
    picture = args.out / "returns.html"
    draw(learner.returns, found if args.resume else committed, args.goal, picture)
    print(f"mean return of the last 20 of {len(learner.returns)} episodes: {learner.mean_return():.0f}")
    print("picture:", picture)
    if room is not None and args.storage == "shared":
        room.close()
    return 0 if not lost and learner.mean_return() >= args.goal else 1


if __name__ == "__main__":
    sys.exit(main())
