"""torch.distributed with three ranks on loopback: the scenarios of `world.py`, run once, and what they must give."""

from __future__ import annotations

import pickle
import socket
import subprocess
from pathlib import Path

import pytest

from tdstore.testing.processes.warm import python

from .world import KINDS, SCENARIOS, SIZE, plain, rich, told, tree

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each rank gave, or raised, in each scenario."""
    folder = tmp_path_factory.mktemp("world")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*python(), "-m", "tests.parallel.world"]
    ranks = [
        subprocess.Popen([*command, str(r), str(port), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for r in range(SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * SIZE, "\n".join(errors)
    return [pickle.loads((folder / f"said-{r}").read_bytes()) for r in range(SIZE)]


class Told:
    """The answers of one scenario."""

    def __init__(self, said, name):
        self.rows = [rank[name] for rank in said]

    @property
    def gave(self):
        for row in self.rows:
            assert row[0] == "gave", row[-1]
        return [row[1] for row in self.rows]

    def raised(self, *ranks):
        """The messages of those ranks, all of which raised; the others did not."""
        assert [r for r, row in enumerate(self.rows) if row[0] == "raised"] == list(ranks), self.rows
        for r in ranks:
            assert "RuntimeError" in self.rows[r][1] or "TDStoreError" in self.rows[r][1], self.rows[r]
        return [self.rows[r][2] for r in ranks]


@pytest.fixture
def ask(said):
    return lambda name: Told(said, name)


def of(value, **kwargs):
    return plain(tree(value, **kwargs))


# -- one to one --------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_send_and_recv(ask, kind):
    sent, received, other = ask(f"send_and_recv[{kind}]").gave
    assert (sent, other) == (None, None)
    tag, values, same_memory = received
    assert (tag, values, same_memory) == (2, of(1), True)


@pytest.mark.parametrize("kind", KINDS)
def test_as_one_buffer(ask, kind):
    """Three leaves of 16, 24 and 8 bytes, each from a multiple of 8 on, in one message."""
    sent, received, _ = ask(f"as_one_buffer[{kind}]").gave
    assert sent == (None, [48])
    assert received == (7, [48], of(1))


def test_one_buffer_of_a_consolidated_tree(ask):
    values = {"z": [True] * 3, "a": 5, "e": []}
    assert ask("one_buffer_of_a_consolidated_tree").gave[1] == (values, True, 0)


def test_one_buffer_in_background(ask):
    sent, received, _ = ask("one_buffer_in_background").gave
    assert sent == (7, True)
    assert received == (None, of(1), of(1))


def test_buckets_change_no_result(ask):
    first, second, third = ask("buckets").gave
    assert first == (of(3), of(3)) and second[0] == third[0] == of(3)


def test_one_buffer_on_one_side_only(ask):
    for message in ask("one_buffer_on_one_side_only").raised(0, 1):
        assert "rank 0 was called with consolidated=True, rank 1 without" in message


def test_tags_and_returns(ask):
    sender, receiver, _ = ask("tags_and_returns").gave
    assert sender[0] == 12
    assert receiver[0] is None
    assert receiver[1] == receiver[2] == sender[1]  # one sequence, drawn alike
    assert sender[2:] == [3, [True] * 3]
    assert receiver[3:] == [3, [True] * 3, [1, 1], True]


def test_both_ways_at_once(ask):
    assert ask("both_ways_at_once").gave == [[2, 2], [1, 1], None]


def test_several_transfers_at_once(ask):
    assert ask("several_transfers_at_once").gave == [[True] * 15, [1, 2, 3, 4, 5], None]


def test_awaited(ask):
    assert ask("awaited").gave == [None, [1, 1], None]


def test_ranks_of_a_group(ask):
    assert ask("ranks_of_a_group").gave == [None, None, [1, 1]]


def test_every_dtype_and_layout(ask):
    assert ask("every_dtype_and_layout").gave[1] == [True] * 6


def test_values_are_skipped_in_words(ask):
    warned = ["entries that are not tensors are not sen"]
    assert ask("values_are_skipped_in_words").gave == [("rank 0", warned), ("rank 1", warned), ("rank 2", [])]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_large_leaves(ask, kind):
    assert ask(f"pieces_of_large_leaves[{kind}]").gave[1] == (True, True)


# -- structures that differ --------------------------------------------------------------------
def test_other_keys(ask):
    for message in ask("other_keys").raised(0, 1):
        assert "'a' is on rank 0 only" in message
        assert "'other' is on rank 1 only" in message


def test_other_shapes(ask):
    for message in ask("other_shapes").raised(0, 1):
        assert "nothing was sent" in message
        assert "'b' is float32 [2, 3] on rank 0, float32 [3, 3] on rank 1" in message


def test_a_receiver_that_may_not_write(ask):
    sender, receiver = ask("a_receiver_that_may_not_write").raised(0, 1)
    assert "rank 1 cannot take part: ReadOnlyError" in sender
    assert "opened for reading only" in receiver


def test_early_and_different(ask):
    for message in ask("early_and_different").raised(0, 1):
        assert "'b' is float32 [2, 3] on rank 0, float32 [3, 3] on rank 1" in message


def test_reduce_of_different(ask):
    for message in ask("reduce_of_different").raised(0, 1, 2):
        assert "'more' is on rank 2 only" in message


def test_all_reduce_of_different_dtypes(ask):
    for message in ask("all_reduce_of_different_dtypes").raised(0, 1, 2):
        assert "'a' is" in message
        assert "float32 [2] on rank 1" in message


def test_gather_into_too_few_rows(ask):
    first, *others = ask("gather_into_too_few_rows").raised(0, 1, 2)
    assert "cannot take a row from each of 2 other ranks" in first
    assert all("rank 0 cannot take part: BatchSizeError" in message for message in others)


@pytest.mark.parametrize("name", ["a_value_that_is_no_data", "a_broadcast_value_that_is_no_data"])
def test_a_value_that_is_no_data(ask, name):
    ranks = (0, 1) if name == "a_value_that_is_no_data" else (0, 1, 2)
    first, *others = ask(name).raised(*ranks)
    assert "the value 'f' cannot be stored" in first
    assert all("rank 0 of the group cannot send its TensorDict: UntrustedDataError" in m for m in others)


def test_a_reduction_that_gloo_lacks(ask):
    for message in ask("a_reduction_that_gloo_lacks").raised(0, 1, 2):
        assert "gloo cannot reduce the leaf 'x' of torch.float8_e5m2" in message
    for message in ask("an_operation_that_gloo_lacks").raised(0, 1, 2):
        assert "'b' of torch.float32 by" in message


def test_complex_sums(ask):
    assert ask("complex_sums").gave == [[6 + 3j, 6 + 3j]] * 3


def test_scatter_of_too_few(ask):
    first, second, third = ask("scatter_of_too_few").rows
    assert second[1][0] == "ValueError"
    assert "needs 3 TensorDicts, one for each rank, and was given 1" in second[2]
    assert "rank 1 cannot take part: ValueError" in first[2]
    assert "rank 1 cannot take part: ValueError" in third[2]


def test_and_still_in_step(ask):
    assert ask("and_still_in_step").gave == [[6, 6]] * 3


# -- all together ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_reduce_to_one(ask, kind):
    assert ask(f"reduce_to_one[{kind}]").gave == [(None, of(1)), (None, of(6)), (None, of(3))]


@pytest.mark.parametrize("kind", KINDS)
def test_reduce_to_all(ask, kind):
    assert ask(f"reduce_to_all[{kind}]").gave == [(None, of(6))] * 3


def test_other_operations_and_waits(ask):
    for rank, row in enumerate(ask("other_operations_and_waits").gave):
        assert row == ([3, 3], [6, 6], [True] * 3, None), rank


def test_reduce_in_a_group(ask):
    first, second, third = ask("reduce_in_a_group").gave
    assert second == of(2)
    assert (first["a"], third["a"]) == ([1, 1], [4, 4])
    assert first["n/c"] == third["n/c"] == [5, 5]  # 1 + (1 + 3): what all_reduce finds after reduce


@pytest.mark.parametrize("kind", KINDS)
def test_gathered(ask, kind):
    first, (is_self, values), third = ask(f"gathered[{kind}]").gave
    assert (first, third) == ((None, of(1)), (None, of(3)))
    assert is_self
    assert values["a"] == [[1, 1], [3, 3]]
    assert values["b"] == [[[1.0] * 3] * 2, [[3.0] * 3] * 2]
    assert values["n/c"] == [[1, 1], [3, 3]]


# -- whole TensorDicts -------------------------------------------------------------------------
def in_one_buffer(value):
    return {**told(rich(value)), "buffers": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_init_remote(ask, kind):
    received = ask(f"init_remote[{kind}]").gave[1]
    assert received == (("LazyStackedTensorDict", of(7)) if kind == "lazy" else in_one_buffer(7))


def test_broadcasts(ask):
    for rank, (itself, found, again, x) in enumerate(ask("broadcasts").gave):
        assert itself == (rank == 1)
        assert found == (told(rich(1)) if rank == 1 else in_one_buffer(1))
        assert again == (told(rich(0)) if rank == 0 else in_one_buffer(0))
        assert x == [[float(rank)] * 3] * 2  # what it is called on is not changed


def test_all_gathers(ask):
    for found in ask("all_gathers").gave:
        assert found == [(of(r, rows=1 + r), f"rank {r}") for r in range(SIZE)]


def test_scatters(ask):
    assert ask("scatters").gave == [in_one_buffer(0), told(rich(1)), in_one_buffer(2)]


def test_every_scenario_is_judged():
    text = Path(__file__).read_text()
    for name in SCENARIOS:
        assert name.split("[")[0] in text, name
