"""Play whole Atari episodes with random actions, and keep each transition as one row of a TensorDict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import ale_py
import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from tqdm import tqdm

from tdstore import TensorDict

GAMES = ("breakout", "space_invaders", "asterix", "seaquest")
SIDE = 84


@dataclasses.dataclass
class Episode:
    """One game from its first frame to its last: `steps + 1` frames, `steps` of everything else."""

    game: str
    frames: list[np.ndarray]
    actions: list[int]
    meanings: list[str]
    rewards: list[float]
    terminated: list[bool]
    truncated: list[bool]

    def __len__(self) -> int:
        return len(self.actions)


def play_episodes(game: str, seed: int) -> Iterator[Episode]:
    """Whole episodes of one game, without end; frames are 84 x 84 RGB."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    env = AtariVectorEnv(game, 1, img_height=SIDE, img_width=SIDE, grayscale=False, stack_num=1, reward_clipping=False)
    names = [action.name for action in env.ale.get_action_set()]
    choose = np.random.default_rng(seed)
    frame, _ = env.reset(seed=seed)
    while True:
        episode = Episode(game, [frame[0, 0].copy()], [], [], [], [], [])
        over = False
        while not over:
            action = choose.integers(len(names), size=1)
            frame, reward, terminated, truncated, _ = env.step(action)
            episode.frames.append(frame[0, 0].copy())  # the emulator writes its next frame into the same memory
            episode.actions.append(int(action[0]))
            episode.meanings.append(names[action[0]])
            episode.rewards.append(float(reward[0]))
            episode.terminated.append(bool(terminated[0]))
            episode.truncated.append(bool(truncated[0]))
            over = episode.terminated[-1] or episode.truncated[-1]
        yield episode
        # The step after the last one only starts the next episode: it is no transition.
        frame, *_ = env.step(np.zeros(1, dtype=np.int64))


def as_tensordict(episode: Episode, number: int) -> TensorDict:
    """The transitions of an episode: `[steps]` rows, what follows an action under `"next"`."""
    steps = len(episode)
    frames = torch.from_numpy(np.stack(episode.frames))
    terminated, truncated = torch.tensor(episode.terminated), torch.tensor(episode.truncated)
    return TensorDict(
        {
            "obs": frames[:-1],
            "action": torch.tensor(episode.actions),
            "meaning": episode.meanings,
            "game": [episode.game] * steps,
            "episode": torch.full((steps,), number, dtype=torch.int32),
            "next": {
                "obs": frames[1:],
                "reward": torch.tensor(episode.rewards, dtype=torch.float32),
                "terminated": terminated,
                "truncated": truncated,
                "done": terminated | truncated,
            },
        },
        batch_size=[steps],
    )


def play(rows: int, games: tuple[str, ...] = GAMES, seed: int = 0) -> TensorDict:
    """At least `rows` transitions, as many of each game, in whole episodes one after the other."""
    parts: list[TensorDict] = []
    with tqdm(total=rows, desc="playing", unit=" transitions", leave=False) as bar:
        for i, game in enumerate(games):
            played = 0
            for episode in play_episodes(game, seed + i):
                parts.append(as_tensordict(episode, len(parts)))
                played += len(episode)
                bar.set_postfix_str(game, refresh=False)
                bar.update(min(len(episode), bar.total - bar.n))
                if played >= rows / len(games):
                    break
    return torch.cat(parts, 0)
