"""Three ranks of one gloo world, in which every test of the collectives runs its part.

Starting a world takes seconds, so it is started once: each rank runs all scenarios, one after another, and
writes down what each gave, or raised.
"""

from __future__ import annotations

import asyncio
import datetime
import pickle
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tdstore
from tdstore import NonTensorStack, TensorDict
from tdstore.parallel.links import Link

SIZE = 3


def tree(value, *, order=1, rows=2):
    """Three leaves that hold `value`; the order of insertion differs from rank to rank."""
    leaves = {
        "b": torch.full((rows, 3), float(value)),
        "a": torch.full((rows,), int(value)),
        "n": {"c": torch.full((rows,), float(value))},
    }
    return TensorDict(dict(list(leaves.items())[::order]), [rows])


def plain(td):
    """Values by key, to be compared."""
    return {"/".join(k if isinstance(k, tuple) else (k,)): td.get(k).tolist() for k in td.keys(True, True)}


class Rank:
    """What a scenario gets: who it is, and where it may put files."""

    def __init__(self, rank, folder):
        self.rank = rank
        self.folder = Path(folder)
        self.group = None  # ranks 0 and 2

    def store(self, kind, td):
        """The TensorDict in a storage of a kind, open for writing."""
        if kind == "memory":
            return td
        if kind == "shared":
            return td.save(storage="shared")
        if kind == "lazy":
            return tdstore.LazyStackedTensorDict(*td.unbind(0))
        where = self.folder / f"{kind}-{self.rank}-{len(list(self.folder.iterdir()))}{'.h5' if kind == 'h5' else ''}"
        td.save(where).close()
        return tdstore.open(where, mode="r+")


KINDS = ["memory", "shared", "memmap", "h5", "lazy"]
SCENARIOS = {}


def scenario(fn):
    SCENARIOS[fn.__name__] = fn
    return fn


def per_kind(fn):
    for kind in KINDS:
        SCENARIOS[f"{fn.__name__}[{kind}]"] = lambda me, kind=kind: fn(me, kind)
    return fn


# -- one to one --------------------------------------------------------------------------------
@per_kind
def send_and_recv(me, kind):
    td = me.store(kind, tree(me.rank + 1, order=-1 if me.rank else 1))
    if me.rank == 0:
        return td.send(1)
    if me.rank == 1:
        before = td["b"].data_ptr()
        tag = td.recv(0)
        return tag, plain(td), kind in ("h5", "lazy") or td["b"].data_ptr() == before
    return None


@per_kind
def as_one_buffer(me, kind):
    """How many messages each rank sent or received, besides those that compare schemas; and what came."""
    td = me.store(kind, tree(me.rank + 1, order=-1 if me.rank else 1))
    moved = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("isend", "irecv"):
            real = getattr(Link, name)

            def counted(link, tensor, other, tag, real=real):
                if tag == 7:
                    moved.append(tensor.numel())
                return real(link, tensor, other, tag)

            patch.setattr(Link, name, counted)
        if me.rank == 0:
            return td.send(1, init_tag=7, consolidated=True), moved
        if me.rank == 1:
            return td.recv(0, init_tag=7, consolidated=True), moved, plain(td)
    return None


@scenario
def one_buffer_of_a_consolidated_tree(me):
    """Bytes of every kind, scalars and leaves without elements, from a consolidated TensorDict into another one."""
    leaves = {"z": torch.ones(3, dtype=torch.bool), "a": torch.tensor(5), "e": torch.zeros(0, 2)}
    td = TensorDict({key: leaf if me.rank == 0 else torch.zeros_like(leaf) for key, leaf in leaves.items()})
    if me.rank == 0:
        td.consolidate().send(1, consolidated=True, pseudo_rand=True)
        return TensorDict().send(1, consolidated=True)
    if me.rank == 1:
        td = td.consolidate()
        td.recv(0, consolidated=True, pseudo_rand=True)
        return plain(td), td.is_consolidated(), TensorDict().recv(0, consolidated=True)
    return None


@scenario
def one_buffer_in_background(me):
    td = tree(me.rank + 1)
    if me.rank == 0:
        sent = td.isend(1, consolidated=True, init_tag=7)
        return sent, [work.wait() for work in td.isend(1, consolidated=True, return_early=True)] != []
    if me.rank == 1:
        first, second = tree(2), tree(2)
        done = first.irecv(0, consolidated=True, init_tag=7)
        for work in second.irecv(0, consolidated=True, return_premature=True):
            work.wait()
        return done, plain(first), plain(second)
    return None


@scenario
def buckets(me):
    td = tree(me.rank)
    td.all_reduce(bucket_bytes=1 << 20)
    other = tree(me.rank)
    other.reduce(0, bucket_bytes=1)
    return plain(td), plain(other)


@scenario
def one_buffer_on_one_side_only(me):
    td = tree(me.rank)
    if me.rank == 0:
        td.send(1, consolidated=True)
    elif me.rank == 1:
        td.recv(0)


@scenario
def tags_and_returns(me):
    td, found = tree(me.rank + 1), []
    if me.rank == 0:
        found.append(td.isend(1, init_tag=10))
        td.send(1, pseudo_rand=True, init_tag=5)
        found.append(td.isend(1, pseudo_rand=True, init_tag=5))
        waits = td.isend(1, return_early=True)
        found += [len(waits), [w.wait() for w in waits]]
    elif me.rank == 1:
        found.append(td.irecv(0, init_tag=10))
        found.append(td.recv(0, pseudo_rand=True, init_tag=5))
        found.append(td.recv(0, pseudo_rand=True, init_tag=5))
        waits = td.irecv(0, return_premature=True)
        found += [len(waits), [w.wait() for w in waits], plain(td)["a"], all(w.is_completed() for w in waits)]
    return found


@scenario
def both_ways_at_once(me):
    if me.rank == 2:
        return None
    mine, theirs = tree(me.rank + 1), tree(0)
    out = mine.isend(1 - me.rank, return_early=True)
    theirs.recv(1 - me.rank)
    [w.wait() for w in out]
    return plain(theirs)["a"]


@scenario
def several_transfers_at_once(me):
    if me.rank == 0:
        waits = [tree(i).isend(1, init_tag=100 * i, return_early=True) for i in range(1, 6)]
        return [w.wait() for ws in waits for w in ws]
    if me.rank == 1:
        tds = [tree(0) for _ in range(5)]
        waits = [td.irecv(0, init_tag=100 * i, return_premature=True) for i, td in enumerate(tds, 1)]
        [w.wait() for ws in waits for w in ws]
        return [plain(td)["a"][0] for td in tds]
    return None


@scenario
def awaited(me):
    td = tree(me.rank + 1)
    if me.rank == 0:
        return asyncio.run(td.asend(1))
    if me.rank == 1:
        return asyncio.run(td.arecv(0)) is td and plain(td)["a"]
    return None


@scenario
def ranks_of_a_group(me):
    td = tree(me.rank + 1)
    if me.rank == 0:
        td.send(2, group=me.group)
        td.send(group_dst=1, group=me.group)
    elif me.rank == 2:
        td.recv(0, group=me.group)
        first = plain(td)["a"]
        td.recv(group_src=0, group=me.group)
        return first
    return None


@scenario
def every_dtype_and_layout(me):
    found = []
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e5m2, torch.int64):
        base = torch.arange(12).reshape(3, 4).to(dtype)
        td = TensorDict(
            {"t": (base if me.rank == 0 else torch.zeros_like(base)).t(), "e": base[:, :0].t(), "z": base[0, 0]}
        )
        if me.rank == 0:
            td.send(1)
        elif me.rank == 1:
            td.recv(0)
            found.append(torch.equal(td["t"].contiguous().view(torch.uint8), base.t().contiguous().view(torch.uint8)))
    return found


@scenario
def values_are_skipped_in_words(me):
    td = tree(me.rank)
    td["s"] = f"rank {me.rank}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if me.rank == 0:
            td.send(1)
        elif me.rank == 1:
            td.recv(0)
    return td["s"], [str(w.message)[:40] for w in caught]


@per_kind
def pieces_of_large_leaves(me, kind):
    from tdstore.parallel import collectives

    collectives.PIECE_BYTES = 40
    try:
        td = me.store(kind, tree(me.rank + 1, rows=50))
        if me.rank == 0:
            td.send(1)
        elif me.rank == 1:
            td.recv(0)
        first = plain(td) if me.rank == 1 else None
        td.all_reduce()
        return first == plain(tree(1, rows=50)), plain(td) == plain(tree(1 + 1 + 3, rows=50))
    finally:
        collectives.PIECE_BYTES = 32 << 20


# -- structures that differ --------------------------------------------------------------------
@scenario
def other_keys(me):
    td = tree(1)
    if me.rank == 1:
        td.rename_key_("a", "other")
    td.send(1) if me.rank == 0 else td.recv(0) if me.rank == 1 else None


@scenario
def other_shapes(me):
    td = tree(1, rows=2 + me.rank)
    td.isend(1) if me.rank == 0 else td.irecv(0) if me.rank == 1 else None


@scenario
def a_receiver_that_may_not_write(me):
    td = tree(1)
    if me.rank == 1:
        td.save(me.folder / "readonly").close()
        td = tdstore.open(me.folder / "readonly")
    td.send(1) if me.rank == 0 else td.recv(0) if me.rank == 1 else None


@scenario
def early_and_different(me):
    td = tree(1, rows=2 + me.rank)
    waits = (
        td.isend(1, return_early=True) if me.rank == 0 else td.irecv(0, return_premature=True) if me.rank == 1 else []
    )
    [w.wait() for w in waits]


@scenario
def reduce_of_different(me):
    td = tree(1)
    if me.rank == 2:
        td["more"] = torch.zeros(2)
    td.reduce(0)


@scenario
def all_reduce_of_different_dtypes(me):
    td = tree(1)
    if me.rank == 1:
        td["a"] = td["a"].float()
    td.all_reduce()


@scenario
def gather_into_too_few_rows(me):
    TensorDict({"a": torch.zeros(5 if me.rank == 0 else ())}).gather_and_stack(0)


@scenario
def a_value_that_is_no_data(me):
    td = TensorDict({"f": print if me.rank == 0 else 1})
    td.init_remote(1) if me.rank == 0 else TensorDict.from_remote_init(0) if me.rank == 1 else None


@scenario
def a_broadcast_value_that_is_no_data(me):
    TensorDict({"f": print if me.rank == 0 else 1}).broadcast(0)


@scenario
def a_reduction_that_gloo_lacks(me):
    TensorDict({"x": torch.ones(2, dtype=torch.float8_e5m2)}).all_reduce()


@scenario
def an_operation_that_gloo_lacks(me):
    tree(1).all_reduce(dist.ReduceOp.BXOR)


@scenario
def and_still_in_step(me):
    """After all those errors nothing is left over that a later transfer could take for its own."""
    td = tree(me.rank + 1)
    td.all_reduce()
    td.send(1) if me.rank == 0 else td.recv(0) if me.rank == 1 else None
    return plain(td)["a"]


# -- all together ------------------------------------------------------------------------------
@per_kind
def reduce_to_one(me, kind):
    td = me.store(kind, tree(me.rank + 1, order=-1 if me.rank else 1))
    return td.reduce(1), plain(td)


@per_kind
def reduce_to_all(me, kind):
    td = me.store(kind, tree(me.rank + 1, order=-1 if me.rank else 1))
    return td.all_reduce(), plain(td)


@scenario
def other_operations_and_waits(me):
    td = tree(me.rank + 1)
    td.all_reduce(op=dist.ReduceOp.MAX)
    first = plain(td)["a"]
    td = tree(me.rank + 1)
    waits = td.all_reduce(async_op=True)
    [w.wait() for w in waits]
    second = plain(td)["a"]
    td = tree(me.rank + 1)
    waits = td.reduce(0, async_op=True, return_premature=True)
    return first, second, [w.wait() for w in waits], td.reduce(0, async_op=True)


@scenario
def complex_sums(me):
    td = TensorDict({"z": torch.tensor([me.rank + 1 + 1j] * 2)}, [2])
    td.all_reduce()
    return td["z"].tolist()


@scenario
def reduce_in_a_group(me):
    td = tree(me.rank + 1)
    if me.rank != 1:
        td.reduce(2, group=me.group)
        td["n"].all_reduce(group=me.group)
    return plain(td)


@per_kind
def gathered(me, kind):
    td = tree(me.rank + 1, order=-1 if me.rank else 1)
    if me.rank == 1:
        td = torch.stack([tree(0), tree(0)])
    td = me.store(kind, td)
    found = td.gather_and_stack(1)
    return found is td if me.rank == 1 else found, plain(td)


def rich(value):
    td = TensorDict({"x": torch.full((2, 3), float(value)), "n": {"y": torch.arange(2)}}, [2], names=["t"])
    td["text"] = "hello"
    td["n", "rows"] = NonTensorStack("p", {"q": (1, None)})
    td["n", "deep"] = TensorDict({"z": torch.zeros(2, 0, dtype=torch.bfloat16)}, [2, 0])
    return td


def told(td):
    buffers = {leaf.untyped_storage().data_ptr() for leaf in td.values(True, True) if leaf.numel()}
    deep = td["n", "deep"]
    return {
        "x": td["x"].tolist(),
        "y": td["n", "y"].tolist(),
        "values": [td["text"], td["n", "rows"]],
        "names": td.names,
        "batch sizes": [tuple(td.batch_size), tuple(deep.batch_size)],
        "keys": list(td.keys()),
        "dtype": str(deep["z"].dtype),
        "buffers": len(buffers),
        "kind": type(td).__name__,
    }


@per_kind
def init_remote(me, kind):
    if me.rank == 0:
        return me.store(kind, tree(7) if kind == "lazy" else rich(7)).init_remote(1)
    if me.rank == 1:
        td = TensorDict.from_remote_init(0)
        return (type(td).__name__, plain(td)) if kind == "lazy" else told(td)
    return None


@scenario
def broadcasts(me):
    td = rich(me.rank)
    found = td.broadcast(1)
    td.init_remote(use_broadcast=True) if me.rank == 0 else None
    again = td if me.rank == 0 else TensorDict.from_remote_init(0, use_broadcast=True)
    return found is td, told(found), told(again), plain(td)["x"]


@scenario
def all_gathers(me):
    td = tree(me.rank, rows=1 + me.rank)
    td["who"] = f"rank {me.rank}"
    found = td.all_gather()
    assert found[me.rank] is not td
    return [(plain(x), x["who"]) for x in found]


@scenario
def scatters(me):
    parts = [rich(rank) for rank in range(SIZE)] if me.rank == 1 else None
    return told(TensorDict().scatter(1, parts))


@scenario
def scatter_of_too_few(me):
    TensorDict().scatter(1, [rich(0)] if me.rank == 1 else None)


def main(rank, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=SIZE,
        timeout=datetime.timedelta(seconds=30),
    )
    me = Rank(rank, folder)
    me.group = dist.new_group([0, 2])
    found = {}
    with open(Path(folder) / f"said-{rank}", "wb") as file:
        for name, run in SCENARIOS.items():
            dist.barrier()
            try:
                found[name] = ("gave", run(me))
            except Exception as error:
                kinds = [c.__name__ for c in type(error).__mro__]
                found[name] = ("raised", kinds, str(error), traceback.format_exc())
        pickle.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
