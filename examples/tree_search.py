"""Play tic-tac-toe by Monte-Carlo tree search against random moves, keep what was played, and draw the search.

    python examples/tree_search.py --games 12 --simulations 200 --out demo-data/tree_search

The tree of the first move is saved to an HDF5 file, opened again, and drawn to `tree.html` and `boxes.html`. All
games go into a forest, which is saved too; `openings.html` shows the tree of the moves that were played. The exit
code is 1 if the search does not win more games than it loses.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
from tqdm import tqdm

import tdstore
from tdstore import TensorDict
from tdstore.rl.trees import MCTSForest, Tree, UCBScore

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
Board = tuple[int, ...]
"""Nine squares: 0 is free, 1 and -1 are the players; 1 begins."""
EMPTY: Board = (0,) * 9


# -- the game ----------------------------------------------------------------------------------
def mover(board: Board) -> int:
    """Return the player whose move it is."""
    return 1 if sum(board) == 0 else -1


def moves(board: Board) -> list[int]:
    """Return the free squares; none once the game is over."""
    return [] if winner(board) else [square for square in range(9) if not board[square]]


def play(board: Board, square: int) -> Board:
    """Return the board after a move."""
    return (*board[:square], mover(board), *board[square + 1 :])


def winner(board: Board) -> int:
    """Return the player with three in a line, 0 for none."""
    for a, b, c in LINES:
        if board[a] and board[a] == board[b] == board[c]:
            return board[a]
    return 0


# -- the search --------------------------------------------------------------------------------
def node(board: Board, square: int | None = None, before: Board = EMPTY) -> Tree:
    """Make a node of a board, and of the move that led to it."""
    rollout = None if square is None else step(before, square).unsqueeze(0)
    data = TensorDict({"observation": torch.tensor(board, dtype=torch.int8)})
    return Tree(count=torch.zeros(()), wins=torch.zeros(()), rollout=rollout, node_data=data)


def step(board: Board, square: int) -> TensorDict:
    """Return a move as a transition; the reward is that of the player who moves."""
    after = play(board, square)
    over = not moves(after)
    following = {
        "observation": torch.tensor(after, dtype=torch.int8),
        "reward": torch.tensor([float(winner(after) == mover(board))]),
        "done": torch.tensor([over]),
    }
    here = torch.tensor(board, dtype=torch.int8)
    return TensorDict({"observation": here, "action": torch.tensor(square), "next": TensorDict(following)})


def finish(board: Board, dice: random.Random) -> int:
    """Play on at random, and return the winner."""
    while options := moves(board):
        board = play(board, dice.choice(options))
    return winner(board)


def search(board: Board, simulations: int, dice: random.Random) -> Tree:
    """Grow a tree of moves below a board.

    The value of a node is that for the player who moved there: so its sign changes from level to level.
    """
    root = node(board)
    score = UCBScore(c=1.4)
    for _ in range(simulations):
        tree, at, path = root, board, []
        while (options := moves(at)) and tree.fully_expanded(len(options)):
            path.append(tree.best_index(score))
            at = play(at, options[path[-1]])
            tree = tree.children()[path[-1]]
        if options:
            square = options[tree.num_children]
            tree.add_child(node(play(at, square), square, at))
            path.append(tree.num_children - 1)
            at = play(at, square)
        root.backpropagate(path, float(finish(at, dice) * -mover(at)), discount=-1.0)
    return root


def best_move(root: Tree) -> int:
    """Return the move that was tried most often."""
    child = root.best_child(lambda tree: torch.stack([torch.as_tensor(child.count) for child in tree.children()]))
    return int(child.branching_action)


# -- the job -----------------------------------------------------------------------------------
def main() -> int:
    """Play, save, draw; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=12)
    parser.add_argument("--simulations", type=int, default=200, help="for each move")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo-data/tree_search"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    dice = random.Random(args.seed)

    first = search(EMPTY, max(args.simulations, 100), dice)
    first.save(args.out / "tree.h5").close()

    forest = MCTSForest(max_size=9 * args.games)
    results = {"won": 0, "drawn": 0, "lost": 0}
    bar = tqdm(range(args.games), desc="games", unit="game", dynamic_ncols=True)
    for game in bar:
        me, board, played = (1, -1)[game % 2], EMPTY, []
        while options := moves(board):
            mine = mover(board) == me
            square = best_move(search(board, args.simulations, dice)) if mine else dice.choice(options)
            played.append(step(board, square))
            board = play(board, square)
        forest.extend(tdstore.stack(played))
        results[{me: "won", 0: "drawn"}.get(winner(board), "lost")] += 1
        bar.set_postfix(results)

    forest.dumps(args.out / "games")
    pictures = draw(args.out)
    print(f"{args.games} games against random moves: {', '.join(f'{n} {name}' for name, n in results.items())}")
    print(f"{len(forest)} different moves are in {args.out / 'games'}")
    print("pictures:", *pictures)
    return 0 if results["won"] > results["lost"] else 1


def draw(folder: Path) -> list[Path]:
    """Draw what was saved, and return the files."""
    with tdstore.open(folder / "tree.h5") as tree:
        squares = "top left,top,top right,left,centre,right,bottom left,bottom,bottom right".split(",")

        def label(tree: Tree, path: tuple[int, ...]) -> str:
            """Return the square of the move, and how good it looks."""
            name = squares[int(tree.branching_action)] if path else "empty board"
            wins, count = float(tree.wins or 0), float(tree.count or 0)
            return f"{name}<br>{wins / max(count, 1):+.2f} of {count:.0f}"

        shallow = two_levels(tree)
        figures = {
            "tree.html": shallow.plot(make_labels=label),
            "boxes.html": tree.plot(figure="box", make_labels=label),
        }
    forest = MCTSForest(max_size=100_000)
    forest.loads(folder / "games")
    openings = forest.get_tree(TensorDict({"observation": torch.zeros(9, dtype=torch.int8)}), max_depth=1)
    figures["openings.html"] = openings.plot(info=["node_id", "prev_action"])
    titles = {
        "tree.html": "First moves and replies: mean result for the player, and visits",
        "boxes.html": "The search tree: a box is as large as its visits",
        "openings.html": "Openings of the games that were played",
    }
    for name, figure in figures.items():
        figure.update_layout(title=titles[name])
        figure.write_html(folder / name, include_plotlyjs="directory")
    return [folder / name for name in figures]


def two_levels(tree: Tree) -> Tree:
    """Return a copy of a tree without what lies below the children's children."""
    copy = tree.clone()
    for child in copy.children():
        for grandchild in child.children():
            grandchild.subtree = None
    return copy


if __name__ == "__main__":
    sys.exit(main())
