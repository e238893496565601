"""Sending stores to other processes, and what both sides see."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from multiprocessing.reduction import ForkingPickler

import pytest
import torch.multiprocessing
from shm_children import HEADER, forked, made, make_and_send, python, read_and_write, send_tensor, set_row

from tdstore.builtin.shared import handoff
from tdstore.builtin.shared.store import SharedHandle, SharedStore, attach_shared, open_shared
from tdstore.errors import StoreNotFoundError
from tdstore.header import Group, Header
from tdstore.types import LeafSpec


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("location", [None, "shm://x"])
def test_writes_are_seen_both_ways(shm, how, location):
    context = multiprocessing.get_context(how)
    answers, go = context.Queue(), context.Queue()
    store = made(location, 1.0)
    child = context.Process(target=read_and_write, args=(store.share_handle(), answers, go))
    child.start()
    assert answers.get(timeout=200) == ([1.0] * 4, True)
    assert answers.get(timeout=200) == "written"
    assert store.view(("a",)).tolist() == [1, 7, 1, 1]
    set_row(store, 2, 8.0)
    go.put(True)
    assert answers.get(timeout=200) == [1, 7, 8, 1]
    child.join(200)
    assert child.exitcode == 0
    assert store.view(("a",)).tolist() == [1, 7, 8, 1]


@pytest.mark.parametrize("module", [multiprocessing, torch.multiprocessing])
def test_a_child_makes_and_drops_what_the_parent_receives(module):
    context = module.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    child = context.Process(target=make_and_send, args=(queue, done))
    child.start()
    store = queue.get(timeout=200)
    done.set()
    child.join(200)
    assert isinstance(store, SharedStore)
    assert store.view(("a",)).tolist() == [3.0] * 4
    assert store.load_header() == HEADER


def test_a_single_leaf_through_a_torch_queue():
    context = torch.multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    child = context.Process(target=send_tensor, args=(queue, done))
    child.start()
    assert queue.get(timeout=200).tolist() == [3.0] * 4
    done.set()
    child.join(200)


def test_the_message_is_small_whatever_is_sent():
    store = open_shared()
    store.create({(f"k{i}",): LeafSpec((1000,), "float32") for i in range(1000)})
    assert len(ForkingPickler.dumps(store.share_handle())) < 400


def test_unsaved_leaves_are_sent_too():
    store = open_shared()
    store.create({("a",): LeafSpec((2,), "int8", fill_value=3)})
    message = ForkingPickler.dumps(store.share_handle())
    assert attach_shared(ForkingPickler.loads(message)).view(("a",)).tolist() == [3, 3]


def test_receiving_twice_maps_once():
    store = made()
    one, two = (attach_shared(ForkingPickler.loads(ForkingPickler.dumps(store.share_handle()))) for _ in range(2))
    assert one.view(("a",)).data_ptr() == two.view(("a",)).data_ptr() == store.view(("a",)).data_ptr()
    again: SharedHandle = ForkingPickler.loads(ForkingPickler.dumps(one.share_handle()))
    assert again.store._arena is store._arena


@pytest.mark.parametrize("location", [None, "shm://once"])
def test_what_was_received_is_opened_once(shm, location):
    """The store that a message makes is the one that its first opener gets; each further one is another."""
    store = made(location)
    handle: SharedHandle = ForkingPickler.loads(ForkingPickler.dumps(store.share_handle()))
    first, second = attach_shared(handle), attach_shared(handle)
    assert first is handle.store
    assert second is not first
    first.close()
    assert second.view(("a",)).tolist() == attach_shared(handle).view(("a",)).tolist() == [0.0] * 4
    own = store.share_handle()
    assert attach_shared(own) is not store


def test_what_was_received_is_let_go():
    gc.collect()
    handoff.collect(1000)
    before = len(os.listdir("/proc/self/fd"))
    messages = [ForkingPickler.dumps(made().share_handle()) for _ in range(50)]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) - before >= 50  # kept for their receivers
    for message in messages:
        assert attach_shared(ForkingPickler.loads(message)).view(("a",)).tolist() == [0.0] * 4
    handoff.collect(1000)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) - before < 5


def test_a_sender_that_ended_is_told():
    reading, writing = os.pipe()
    forked(lambda: os.write(writing, bytes(ForkingPickler.dumps(made().share_handle()))) and None)
    message = os.read(reading, 10_000)
    os.close(reading), os.close(writing)
    with pytest.raises(StoreNotFoundError, match=r"shm://NAME"):
        ForkingPickler.loads(message)


def test_a_number_that_means_another_file_by_now_is_noticed(tmp_path):
    message = handoff.send(made()._arena)
    other = made()
    with pytest.raises(StoreNotFoundError):
        handoff.receive(message._replace(token=b"x" * 16, fd=other._arena.fd))
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    with pytest.raises(StoreNotFoundError):
        handoff.receive(message._replace(token=b"x" * 16, fd=plain))
    os.close(plain)


def test_unrelated_processes_by_name(shm):
    store = made("shm://run 1", 2.0)
    done = python(
        "s = open_shared('shm://run 1', mode='r+')\n"
        "print(s.view(('a',)).tolist(), s.load_header() == HEADER)\n"
        "set_row(s, 3, 9.0)\n"
        "s.create({('b',): LeafSpec((2,), 'int8', fill_value=4)})\n"
        "s.save_header(HEADER)"
    )
    assert done.stdout == "[2.0, 2.0, 2.0, 2.0] True\n", done.stderr
    assert store.view(("a",)).tolist() == [2, 2, 2, 9]
    assert store.refresh()
    assert store.view(("b",)).tolist() == [4, 4]


def test_a_fork_has_the_store_as_it_is():
    store = made()
    set_row(store, 0, 1.0)  # takes a slot that the child must not use as its own
    assert forked(lambda: set_row(store, 1, 2.0)) == 0
    set_row(store, 2, 3.0)
    assert store.view(("a",)).tolist() == [1, 2, 3, 0]
    assert store.verify() == []


def test_disjoint_rows_from_many_processes(shm):
    store = made("shm://x", rows=400)

    def rows_of(k: int):
        mine = open_shared("shm://x", mode="r+")
        for row in range(k, 400, 4):
            set_row(mine, row, row + 1.0)

    children = []
    for k in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                rows_of(k)
            finally:
                os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert store.view(("a",)).tolist() == [float(i + 1) for i in range(400)]


def test_readers_see_one_generation_while_a_writer_saves(shm):
    """Each catalogue names as many leaves as its header says."""
    store = made("shm://x")
    news, tell = os.pipe()

    def save_many():
        os.close(tell)
        for i in range(1, 150):
            if i % 30 == 0:  # not all of them before the reader's turn: it tells of each generation that is new to it
                os.read(news, 1)
            store.create({(f"k{i}",): LeafSpec((1,), "int8")})
            store.save_header(Header({(): Group(batch_size=(i + 1,))}))

    pid = os.fork()
    if pid == 0:
        try:
            save_many()
        finally:
            os._exit(0)
    seen = set()
    reader = open_shared("shm://x", mode="r")
    deadline = time.monotonic() + 60
    try:
        while 150 not in seen and time.monotonic() < deadline:
            reader.refresh()
            count = len(list(reader.paths()))
            assert reader.load_header().groups[()].batch_size == (4 if count == 1 else count,)
            if count not in seen:
                os.write(tell, b"x")
            seen.add(count)
    finally:
        os.close(tell)
        os.waitpid(pid, 0)
        os.close(news)
    assert len(seen) > 3 and 150 in seen
