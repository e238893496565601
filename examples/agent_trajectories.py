"""Record trajectories of agents from several processes into any place, through a `kill -9`, and replay them.

    python examples/agent_trajectories.py --storage memmap
    python examples/agent_trajectories.py --storage h5        (zarr)
    python examples/agent_trajectories.py --storage s3://bucket/agents --options '{"key": "me", "secret": "..."}'

An agent adds up numbers. It calls a tool that adds two of them, or guesses; its tokens are the bytes of what it says,
and a seed decides what it does. Each process records into a place of its own below `--storage`, so that no writer waits
for another, and `tdstore.concat` reads them all as one table.

In the middle all processes are killed. Every trajectory that a process had committed is then looked for and compared
to what its seed gives. New processes go on where the killed ones were. At the end, epochs of shuffled batches are read,
and each trajectory has to come once. The exit code is 1 if a committed trajectory was lost, or the replay is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

import tdstore
from tdstore import errors
from tdstore.data import Epochs
from tdstore.rl.agents import Step, Trajectory

SUFFIXES = {"h5": ".h5", "zarr": ".zarr"}
TOOL = {"name": "add", "description": "Add two integers."}


# -- the agent ---------------------------------------------------------------------------------
def play(worker: int, number: int) -> Trajectory:
    """Let the agent do one task. The same numbers give the same trajectory, to the bit."""
    dice = random.Random(f"{worker}/{number}")
    numbers = [dice.randrange(100) for _ in range(dice.randrange(2, 7))]
    task = " + ".join(map(str, numbers))
    read: dict[str, Any] = {"role": "user", "content": f"What is {task}?"}
    steps, total = [], numbers[0]
    for following in numbers[1:]:
        if dice.random() < 0.1:  # the agent is tired, and guesses
            break
        call = {"name": TOOL["name"], "arguments": {"a": total, "b": following}}
        steps.append(turn(dice, read, f"I add {following}.", [call], 0.0))
        total += following
        read = {"role": "tool", "name": TOOL["name"], "content": str(total)}
    reward = float(total == sum(numbers))
    steps.append(turn(dice, read, f"The sum is {total}.", [], reward))
    return Trajectory.from_steps(steps, task=task, terminated=True)


def turn(dice: random.Random, read: dict[str, Any], said: str, calls: list[dict[str, Any]], reward: float) -> Step:
    """Return a step: the agent reads a message, and answers with a text and calls."""
    prompt, answer = read["content"].encode(), said.encode()
    return Step(
        messages=[read, {"role": "assistant", "content": said}],
        tool_calls=calls,
        reward=reward,
        token_ids=[*prompt, *answer],
        log_probs=[0.0] * len(prompt) + [math.log(1 - dice.random()) for _ in answer],
        loss_mask=[False] * len(prompt) + [True] * len(answer),
    )


def same(one: Trajectory, other: Trajectory) -> bool:
    """Say whether two trajectories are equal in all that they hold."""
    values = all(one.get(key) == other.get(key) for key in ("task", "messages", "tool_calls"))
    tensors = ("rewards", "token_counts", "token_ids", "log_probs", "loss_mask", "terminated")
    return values and all(one.get(key).tolist() == other.get(key).tolist() for key in tensors)


# -- places ------------------------------------------------------------------------------------
def place_of(args: argparse.Namespace, worker: int) -> tuple[str, dict[str, Any]]:
    """Return the place of a process, and the options to open it."""
    if "://" in args.storage:
        options = {"storage_options": json.loads(args.options)} if args.options else {}
        return f"{args.storage}/{worker}", options
    return str(args.out / f"agents-{worker}{SUFFIXES.get(args.storage, '')}"), {"storage": args.storage}


def open_place(args: argparse.Namespace, worker: int, mode: str) -> Any:
    """Open the table of a process; where its writer was killed within a commit, take what is whole."""
    place, options = place_of(args, worker)
    try:
        return tdstore.open(place, mode=mode, **options)
    except errors.DirtyStoreError:
        return tdstore.open(place, mode=mode, recover="accept", **options)


def record(args: argparse.Namespace, worker: int, sender: Connection) -> None:
    """Record trajectories of one process until there are enough, and send how many are committed."""
    try:
        table = open_place(args, worker, "r+")
    except errors.StoreNotFoundError:
        place, options = place_of(args, worker)
        table = Trajectory.create(place, **options)
    while len(table) < args.trajectories:
        table.append(play(worker, len(table)))
        table.commit()
        sender.send(len(table))
    table.close()


# -- watching ----------------------------------------------------------------------------------
def watch(args: argparse.Namespace, bar: Any, kill_at: int | None) -> list[int]:
    """Run the processes, kill them once so many trajectories are committed; return how many each had committed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tdstore.data", "tdstore.rl.agents"])  # imported once, for all processes
    committed = [0] * args.workers
    workers, receivers = [], {}
    for number in range(args.workers):
        receiver, sender = context.Pipe(duplex=False)
        workers.append(context.Process(target=record, args=(args, number, sender)))
        workers[-1].start()
        sender.close()  # the process has the only one, so that its end is the end of the pipe
        receivers[receiver] = number
    while receivers and (kill_at is None or sum(committed) < kill_at):
        for receiver in wait(list(receivers)):
            try:
                committed[receivers[receiver]] = receiver.recv()
            except EOFError:
                del receivers[receiver]
        bar.update(max(sum(committed) - bar.n, 0))
    for worker in workers:
        if kill_at is not None:
            worker.kill()
        worker.join()
    if kill_at is None and any(worker.exitcode for worker in workers):
        raise SystemExit(f"the processes ended with {[worker.exitcode for worker in workers]}")
    return committed


def check(args: argparse.Namespace, committed: list[int]) -> tuple[int, int]:
    """Return how many trajectories are there, and how many are lost or not what their seed gives."""
    found = lost = 0
    for worker, count in enumerate(committed):
        try:
            table = open_place(args, worker, "r")
        except errors.StoreNotFoundError:
            lost += count
            continue
        rows = [table[number] for number in range(len(table))]
        found += len(rows)
        lost += max(count - len(rows), 0) + sum(not same(row, play(worker, n)) for n, row in enumerate(rows))
        table.close()
    return found, lost


def replay(args: argparse.Namespace) -> tuple[int, int, float]:
    """Read an epoch of shuffled batches; return its trajectories, its sampled tokens, and the mean return."""
    places = [place_of(args, worker) for worker in range(args.workers)]
    table = tdstore.concat([place for place, _ in places], **places[0][1])
    tasks, tokens, total = [], 0, 0.0
    for batch in Epochs(table, batch_size=args.batch, seed=args.seed):
        tasks += list(batch.task)
        tokens += int(batch.loss_mask.values().sum())
        total += float(batch.rewards.values().sum())
    expected = [play(worker, n).task for worker in range(args.workers) for n in range(args.trajectories)]
    table.close()
    return (len(tasks) if sorted(tasks) == sorted(expected) else -1), tokens, total / max(len(tasks), 1)


def main() -> int:
    """Record through a kill, check, replay; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="memmap", help="memmap, h5, zarr, or a URL")
    parser.add_argument("--options", metavar="JSON", help="storage_options of a bucket")
    parser.add_argument("--workers", type=int, default=3, help="processes that record")
    parser.add_argument("--trajectories", type=int, default=100, help="of each process")
    parser.add_argument("--kill-at", type=int, help="kill after so many trajectories of all; default: the half")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-data/agent_trajectories"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    total = args.workers * args.trajectories
    with tqdm(total=total, unit="trajectory", desc=args.storage, dynamic_ncols=True) as bar:
        committed = watch(args, bar, total // 2 if args.kill_at is None else args.kill_at)
        found, lost = check(args, committed)
        bar.write(f"killed after {sum(committed)} committed trajectories: {found} are there and whole, {lost} are lost")
        watch(args, bar, None)
    replayed, tokens, mean = replay(args)
    print(f"{replayed} of {total} trajectories replayed, {tokens} sampled tokens, mean return {mean:.2f}")
    return 0 if not lost and replayed == total else 1


if __name__ == "__main__":
    sys.exit(main())
