"""Train a small convolutional network from Atari transitions in a bucket, without playing.

    python examples/offline_atari.py
    python examples/offline_atari.py --storage s3://bucket/atari --options '{"key": "me", "secret": "..."}'
    python examples/offline_atari.py --storage demo-data/atari-h5.h5      (what `make demo` leaves)

The data is that of the demo: whole episodes, played at random. Without `--storage` an S3 server is started on this
machine. Where the place is empty, episodes of `--game` are played and saved there first.

The network learns an inverse model: it sees two frames that follow one another, and says which way the player moved
between them. Batches of random rows are read from the bucket while it learns; only the entries that it needs travel.
The last fifth of the episodes is held out. `moves.html` shows the share of right answers there, beside that of always
giving the most frequent answer, and some frames with what the network says of them. The exit code is 1 if the network
is not better than that. By default, 17 s of CPU time give 85 % right answers, and the most frequent answer 48 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import tdstore
from tdstore import errors
from tdstore.rl.buffers import ImmutableDatasetWriter, SamplerWithoutReplacement, TensorDictReplayBuffer
from tdstore.rl.storages import TensorStorage

sys.path.insert(0, str(Path(__file__).parent / "atari_demo"))

from play import GAMES, SIDE, play
from servers import servers

BATCH, PREFETCH = 64, 4
RATE = 2e-3
ENTRIES = ("obs", ("next", "obs"))
WAYS = ("left", "neither", "right")


# -- the data ----------------------------------------------------------------------------------
@contextlib.contextmanager
def bucket(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the place of the data, and the options to open it; start an S3 server where no place is named."""
    if args.storage is not None:
        yield args.storage, {"storage_options": json.loads(args.options)} if args.options else {}
        return
    with servers(args.out) as running:
        if running.s3 is None:
            raise SystemExit(f"no S3 server starts here ({running.missing}): name a place with --storage")
        print(f"a bucket of {running.s3_kind} on this machine: {running.s3}")
        yield f"{running.s3}/atari", {}


def opened(args: argparse.Namespace, place: str, options: dict[str, Any]) -> Any:
    """Open the data, which is played and saved first where there is none."""
    try:
        return tdstore.open(place, **options)
    except errors.StoreNotFoundError:
        played = play(args.rows, (args.game,))
        played.save(place, progress=True, **options).close()
        return tdstore.open(place, **options)


def ways_of(meanings: list[str]) -> Tensor:
    """Return which of `WAYS` each action goes, int64 `[rows]`."""
    return torch.tensor([1 + ("RIGHT" in meaning) - ("LEFT" in meaning) for meaning in meanings])


def held_out(episode: Tensor) -> Tensor:
    """Whether each row is of the last fifth of the episodes, bool `[rows]`."""
    numbers = episode.unique()
    return episode >= numbers[len(numbers) - max(1, len(numbers) // 5)]


# -- the network -------------------------------------------------------------------------------
class InverseModel(nn.Module):
    """Which way the player moved between two frames, `[n, 3]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 81, 128), nn.ReLU(), nn.Linear(128, len(WAYS)),
        )  # fmt: skip

    def forward(self, rows: Any) -> Tensor:
        """Return logits for rows with uint8 frames `[n, 84, 84, 3]` in `obs` and in `next`."""
        here, after = (frames.float().mean(-1) / 255 for frames in (rows["obs"], rows["next", "obs"]))
        logits: Tensor = self.layers(torch.stack([here, after, 4 * (after - here)], 1))
        return logits


def answers(net: InverseModel, rows: Any) -> Tensor:
    """Return what the network says of stored rows, which are read block by block."""
    blocks = (rows[first : first + 256].to_tensordict() for first in range(0, len(rows), 256))
    with torch.no_grad():
        return torch.cat([net(block).argmax(1) for block in blocks])


# -- the job -----------------------------------------------------------------------------------
def learn(args: argparse.Namespace, rows: Any, way: Tensor, unseen: Tensor) -> tuple[list[tuple[int, float]], Tensor]:
    """Train the network on the rows that are not held out.

    Returns:
        Rows seen and share of right answers on the held-out rows, after each pass; and the last answers.
    """
    train, test = ((~unseen).nonzero().squeeze(1), unseen.nonzero().squeeze(1))
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(rows[train]), writer=ImmutableDatasetWriter(), sampler=SamplerWithoutReplacement(),
        batch_size=BATCH, prefetch=PREFETCH,
    )  # fmt: skip
    net = InverseModel()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    curve = []
    with tqdm(total=args.passes * len(train), unit="row", desc="learning", dynamic_ncols=True) as bar:
        for _ in range(args.passes):
            for batch in buffer:
                loss = nn.functional.cross_entropy(net(batch), way[train[batch["index"]]])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bar.update(len(batch))
            said = answers(net, rows[test])
            curve.append((int(bar.n), float((said == way[test]).float().mean())))
            bar.set_postfix(right=f"{curve[-1][1]:.0%}")
    buffer.close()
    return curve, said


def draw(curve: list[tuple[int, float]], frequent: float, test: Any, way: Tensor, said: Tensor, path: Path) -> None:
    """Draw the share of right answers, and some held-out rows with what the network said."""
    import plotly.graph_objects as graphs
    from plotly.subplots import make_subplots

    shown = torch.linspace(0, len(test) - 1, 6).long()
    some = test[shown].to_tensordict()
    titles = [f"{WAYS[way[i]]},<br>said: {WAYS[said[i]]}" for i in shown.tolist()]
    figure = make_subplots(
        rows=3, cols=6, specs=[[{"colspan": 6}, *[None] * 5], [{}] * 6, [{}] * 6],
        row_heights=[0.4, 0.3, 0.3], vertical_spacing=0.16,
        subplot_titles=["right answers on held-out episodes", *titles, *["the next frame"] * 6],
    )  # fmt: skip
    seen, right = zip(*curve, strict=True)
    figure.add_trace(graphs.Scatter(x=seen, y=right, name="network"), row=1, col=1)
    figure.add_trace(
        graphs.Scatter(x=seen, y=[frequent] * len(seen), name="most frequent answer", line_dash="dot"), row=1, col=1
    )
    for column in range(6):
        for row, frame in ((2, some["obs"][column]), (3, some["next", "obs"][column])):
            figure.add_trace(graphs.Image(z=frame.tolist()), row=row, col=column + 1)
    figure.update_xaxes(title="rows seen", row=1, col=1)
    figure.update_yaxes(title="right answers", tickformat=".0%", range=[0, 1], row=1, col=1)
    for row in (2, 3):
        figure.update_xaxes(visible=False, row=row)
        figure.update_yaxes(visible=False, row=row)
    figure.update_annotations(font_size=12)
    figure.update_layout(title="Which way did the player move?", height=750)
    figure.write_html(path, include_plotlyjs="directory")


def main() -> int:
    """Save if need be, learn, draw; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", help="URL or path of the data; default: a bucket on this machine")
    parser.add_argument("--options", metavar="JSON", help="storage_options of a bucket")
    parser.add_argument("--game", choices=GAMES, default=GAMES[0], help="whose rows are learned from")
    parser.add_argument("--rows", type=int, default=3000, help="transitions to play, where there are none")
    parser.add_argument("--passes", type=int, default=3, help="over the data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-data/offline_atari"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the other cores fetch what comes next
    with bucket(args) as (place, options), opened(args, place, options) as data:
        shape = tuple(data.get_item_shape("obs"))[1:]
        if shape != (SIDE, SIDE, 3):
            parser.error(f"the frames of {place} have the shape {shape}, not those of the demo")
        mine = torch.tensor([game == args.game for game in data["game"]]).nonzero().squeeze(1)
        print(f"{len(data)} transitions are in {place}, {len(mine)} of them of {args.game}")
        if not len(mine):
            parser.error(f"there are no rows of {args.game} in {place}")
        meanings = list(data["meaning"])
        way, unseen = ways_of([meanings[row] for row in mine.tolist()]), held_out(data["episode"][mine])
        if unseen.all():
            parser.error(f"the rows of {place} are of one episode, and one is held out: play more of them, by --rows")
        rows = data.select(*ENTRIES)[mine]  # nothing is read: all else stays in the bucket
        curve, said = learn(args, rows, way, unseen)
        frequent = float((way[unseen] == way[~unseen].mode().values).float().mean())
        picture = args.out / "moves.html"
        draw(curve, frequent, rows[unseen.nonzero().squeeze(1)], way[unseen], said, picture)
    print(f"right answers on held-out episodes: {curve[-1][1]:.0%}; by the most frequent answer: {frequent:.0%}")
    print("picture:", picture)
    return 0 if curve[-1][1] > frequent else 1


if __name__ == "__main__":
    sys.exit(main())
