from __future__ import annotations

import os
import pickle
import secrets
import stat
from contextlib import nullcontext

import pytest
import torch
from shm_children import HEADER, made, set_row

import tdstore
from tdstore import TensorDict, lifetime
from tdstore.builtin.shared.store import attach_shared, open_shared, remove
from tdstore.errors import (
    InvalidArgumentError,
    OptionError,
    ReadOnlyError,
    StoreBusyError,
    StoreClosedError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Header
from tdstore.types import LeafSpec, Read, Write

F4 = LeafSpec((4,), "float32")


def test_an_anonymous_store_is_always_new():
    assert open_shared().url == "shm://"
    for mode in ("r", "r+"):
        with pytest.raises(StoreNotFoundError, match="shm://NAME"):
            open_shared(None, mode=mode)


def test_only_shm_locations_are_taken(shm):
    with pytest.raises(OptionError, match="s3://bucket"):
        open_shared("s3://bucket/x")
    with pytest.raises(OptionError, match="recover"):
        open_shared("shm://x", recover="zero")
    with pytest.raises(OptionError, match="no folder"):
        open_shared("shm://x", directory=shm + "/missing")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", ".", "..", "%2F", "ü 日本", "a\0b", "tds.0.x", "-", "A.b_c"])
def test_odd_names_stay_in_the_folder(shm, name):
    made(f"shm://{name}", 5.0)
    (file,) = os.listdir(shm)
    assert file.startswith(f"tds.{os.geteuid()}.")
    assert stat.S_IMODE(os.stat(f"{shm}/{file}").st_mode) == 0o600
    assert open_shared(f"shm://{name}", mode="r").view(("a",)).tolist() == [5.0] * 4
    for other in ("%252F", "x", "a%2Fb"):
        with pytest.raises(StoreNotFoundError):
            open_shared(f"shm://{other}", mode="r")


def test_names_that_cannot_be(shm):
    with pytest.raises(OptionError, match="1 to 200"):
        open_shared("shm://" + "x" * 201)
    with pytest.raises(OptionError, match="surrogate"):
        open_shared("shm://\udc80")
    assert os.listdir(shm) == []


def test_nothing_is_seen_before_the_first_save(shm):
    old = made("shm://x", 1.0)
    new = open_shared("shm://x", mode="w")
    new.create({("b",): F4})
    assert list(open_shared("shm://x", mode="r").paths()) == [("a",)]
    new.save_header(Header())
    assert list(open_shared("shm://x", mode="r").paths()) == [("b",)]
    assert old.view(("a",)).tolist() == [1.0] * 4
    assert len(os.listdir(shm)) == 1


@pytest.mark.parametrize("end", ["close", "drop"])
def test_no_trace_without_a_save(shm, end):
    store = open_shared("shm://x")
    store.create({("a",): F4})
    assert len(os.listdir(shm)) == 1
    store.close() if end == "close" else None
    del store
    lifetime.settle()  # what was dropped is closed in a thread
    assert os.listdir(shm) == []


def test_saving_into_a_replaced_store_is_told(shm):
    old = made("shm://x")
    made("shm://x")
    with pytest.raises(StoreNotFoundError, match="replaced"):
        old.save_header(Header())
    remove("shm://x")
    with pytest.raises(StoreNotFoundError):
        remove("shm://x")


def test_x_refuses_and_a_opens(shm):
    store = made("shm://x", mode="a")
    with pytest.raises(StoreExistsError, match="shm://x"):
        open_shared("shm://x", mode="x")
    set_row(open_shared("shm://x", mode="a"), 2, 9.0)
    assert store.view(("a",)).tolist() == [0, 0, 9, 0]


def test_x_that_comes_second_changes_nothing(shm):
    first, second = open_shared("shm://x", mode="x"), open_shared("shm://x", mode="x")
    first.create({("a",): F4})
    first.save_header(HEADER)
    with pytest.raises(StoreExistsError):
        second.save_header(HEADER)
    second.close()
    assert list(open_shared("shm://x", mode="r").paths()) == [("a",)]
    assert len(os.listdir(shm)) == 1


def test_reading_is_read_only_even_through_views(shm):
    store = made("shm://x")
    reader = open_shared("shm://x", mode="r")
    for change in (
        lambda: set_row(reader, 0, 1.0),
        lambda: reader.create({("b",): F4}),
        lambda: reader.delete([("a",)]),
        lambda: reader.save_header(HEADER),
        lambda: reader.resize({("a",): 9}),
        lambda: reader.rename({("a",): ("b",)}),
    ):
        with pytest.raises(ReadOnlyError, match="shm://x"):
            change()
    reader.view(("a",)).fill_(5.0)
    assert store.view(("a",)).tolist() == [0.0] * 4
    set_row(store, 1, 2.0)
    assert open_shared("shm://x", mode="r").view(("a",)).tolist() == [0, 2, 0, 0]


def test_growing_keeps_old_tensors_and_few_descriptors():
    store = open_shared()
    views = {}
    before = len(os.listdir("/proc/self/fd"))
    for i in range(300):
        store.create({(f"k{i}",): LeafSpec((100,), "int32", fill_value=i)})
        views[i] = store.view((f"k{i}",))
    assert len(os.listdir("/proc/self/fd")) - before < 16
    assert all(views[i].eq(i).all() and store.view((f"k{i}",)).data_ptr() == v.data_ptr() for i, v in views.items())
    assert all(v.data_ptr() % 64 == 0 for v in views.values())


def test_leaves_of_every_dtype_and_shape_do_not_touch_each_other():
    store = open_shared()
    specs = {
        (f"{n}{shape}",): LeafSpec(shape, n, fill_value=1)
        for n in ("bool", "uint8", "int64", "bfloat16", "complex128", "float8_e5m2")
        for shape in ((), (3,), (0, 10**9), (2, 0), (3, 1, 5))
    }
    store.create(specs)
    store.save_header(Header())
    again = attach_shared(store.share_handle())
    assert again.specs(list(specs)) == list(specs.values())
    for path in specs:
        store.view(path).zero_()
        assert all((t.float() if not t.is_complex() else t).eq(0).all() for t in [again.view(path)])
        store.view(path).fill_(1)
    assert all((v.float() if not v.is_complex() else v).eq(1).all() for v in map(again.view, specs))


def test_leaves_have_version_counters_of_their_own():
    store = open_shared()
    store.create({("a",): F4, ("b",): F4})
    a, b = store.view(("a",)), store.view(("b",))
    version = a._version
    w = torch.ones(4, requires_grad=True)
    out = (w * a).sum()
    b.add_(1)
    out.backward()
    assert a._version == version and a._base is None


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_many_leaves_are_made_at_once_as_single_ones_are(shm, mode):
    shapes = [(5,), (), (3, 0), (2, 3, 4), (1,), (16,), (7, 9)]
    kinds = [torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.complex128, torch.float8_e4m3fn]
    store = open_shared("shm://x")
    specs = {(f"{dtype} {i}",): LeafSpec(shape, dtype) for i, shape in enumerate(shapes) for dtype in kinds}
    store.create({("few",): F4.replace(dtype=torch.int16), **specs})
    store.save_header(HEADER)
    with mode():
        opened = open_shared("shm://x", mode="r+")
        entries = opened._entries
        many, single = opened._arena.tensors([*entries.values()]), [*map(opened._arena.tensor, entries.values())]
    for path, a, b in zip(entries, many, single, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.data_ptr()) == (b.shape, b.dtype, b.stride(), b.data_ptr()), path
        facts = [(t._base, t.is_leaf, t.requires_grad, t.is_shared(), t.is_inference(), t._is_view()) for t in (a, b)]
        assert facts[0] == facts[1]
    if mode is not torch.inference_mode:
        before = [t._version for t in many]
        many[3].fill_(1)
        assert [t._version - v for t, v in zip(many, before, strict=True)] == [int(i == 3) for i in range(len(many))]
        assert [t.float().sum().item() > 0 for t in many if not t.is_complex()].count(True) == int(many[3].numel() > 0)
    assert opened.specs(list(entries)) == store.specs(list(entries))


def test_specs_follow_changes_commits_and_others(shm):
    store = open_shared("shm://x")
    store.create({("a",): F4, ("b",): F4})
    store.save_header(HEADER)
    first, second = open_shared("shm://x", mode="r+"), open_shared("shm://x", mode="r+")
    shapes = lambda s: {path[0]: spec.shape for path, spec in zip(s.paths(), s.specs(list(s.paths())), strict=True)}  # noqa: E731
    assert shapes(first) == {"a": (4,), "b": (4,)}
    first.resize({("a",): 6})
    assert shapes(first) == {"a": (6,), "b": (4,)} and shapes(second) == {"a": (4,), "b": (4,)}
    first.discard()
    assert shapes(first) == {"a": (4,), "b": (4,)}
    first.resize({("a",): 9})
    first.rename({("b",): ("c",)})
    first.save_header(HEADER)
    assert shapes(first) == {"a": (9,), "c": (4,)}
    assert second.refresh() and shapes(second) == {"a": (9,), "c": (4,)}
    first.delete([("c",)])
    first.discard()
    assert shapes(first) == {"a": (9,), "c": (4,)}


def test_resize_both_ways(shm):
    store = open_shared("shm://x")
    store.create({("a",): LeafSpec((2, 2), "int16", fill_value=4), ("n",): LeafSpec((), "int16")})
    store.save_header(HEADER)
    reader = open_shared("shm://x", mode="r")
    store.write([Write(("a",), (), torch.arange(4, dtype=torch.int16).reshape(2, 2))])
    store.resize({("a",): 4})
    assert store.view(("a",)).tolist() == [[0, 1], [2, 3], [4, 4], [4, 4]]
    assert not reader.refresh() and reader.view(("a",)).shape == (2, 2)
    store.save_header(HEADER)
    assert reader.refresh() and not reader.refresh()
    assert reader.view(("a",)).tolist() == store.view(("a",)).tolist()
    store.resize({("a",): 1})
    store.resize({("a",): 3})
    assert store.view(("a",)).tolist() == [[0, 1], [4, 4], [4, 4]]
    store.save_header(HEADER)
    assert open_shared("shm://x", mode="r").view(("a",)).shape == (3, 2)
    with pytest.raises(InvalidArgumentError, match="'n'"):
        store.resize({("n",): 3})


def test_rename_swaps_without_moving():
    store = open_shared()
    store.create({("a",): LeafSpec((1,), "int8", fill_value=1), ("b",): LeafSpec((1,), "int8", fill_value=2)})
    store.rename({("a",): ("b",), ("b",): ("a",)})
    assert [t.item() for t in store.read([Read(("a",)), Read(("b",))])] == [2, 1]


def test_two_writers_of_the_structure_one_is_told(shm):
    made("shm://x")
    one, two = open_shared("shm://x", mode="r+"), open_shared("shm://x", mode="r+")
    one.create({("one",): F4})
    two.create({("two",): F4})
    one.save_header(HEADER)
    with pytest.raises(StoreBusyError, match="open it again"):
        two.save_header(HEADER)
    with pytest.raises(StoreBusyError):
        two.refresh()
    set_row(two, 0, 3.0)
    now = open_shared("shm://x", mode="r")
    assert set(now.paths()) == {("a",), ("one",)} and now.view(("a",))[0] == 3.0
    # Their unsaved leaves never overlapped.
    one.view(("one",)).fill_(1), two.view(("two",)).fill_(2)
    assert one.view(("one",)).tolist() == [1] * 4


def test_saving_nothing_new_is_no_conflict(shm):
    made("shm://x")
    stores = [open_shared("shm://x", mode="r+") for _ in range(3)]
    for store in stores:
        store.save_header(HEADER)


def test_row_writers_need_no_turns_but_have_a_limit():
    store = made(rows=600)
    writers = [attach_shared(store.share_handle()) for _ in range(513)]
    for i, writer in enumerate(writers[:512]):
        set_row(writer, i, float(i))
    with pytest.raises(StoreBusyError, match="512"):
        set_row(writers[512], 0, 1.0)
    writers[0].close()
    set_row(writers[512], 512, 512.0)
    assert store.view(("a",))[:513].tolist() == list(range(513))


def test_bad_leaves_are_refused():
    store = open_shared()
    with pytest.raises(OptionError, match="surrogate"):
        store.create({("a\ud800",): F4})
    with pytest.raises(OptionError, match="chunks"):
        store.create({("a",): LeafSpec((4,), "int8", chunks=2)})
    with pytest.raises(OptionError, match="256"):
        store.create({("a",) * 257: F4})
    with pytest.raises(InvalidArgumentError, match="needs a name"):
        store.create({(): F4})
    assert list(store.paths()) == []


def test_not_preallocated_memory_is_taken_when_written():
    eager, lazy = open_shared(), open_shared(preallocate=False)
    for store in (eager, lazy):
        store.create({("a",): LeafSpec((64 << 20,), "uint8")})
        store.save_header(Header())
    assert eager.nbytes_stored() > 64 << 20 > 1 << 20 > lazy.nbytes_stored()


def test_closing_frees_memory_but_not_tensors_in_use():
    store = made(value=2.0)
    leaf = store.view(("a",))
    store.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.view(("a",))
    assert leaf.tolist() == [2.0] * 4


def test_plain_pickle_of_an_anonymous_store_says_what_to_do():
    with pytest.raises(UnsupportedError, match=r"shm://NAME.*memmap"):
        pickle.dumps(made().share_handle())


def test_plain_pickle_of_a_named_store_is_its_name(shm):
    store = made("shm://x")
    data = pickle.dumps(store.share_handle())
    assert len(data) < 1000
    set_row(attach_shared(pickle.loads(data)), 3, 8.0)
    assert store.view(("a",))[3] == 8.0
    made("shm://x")
    with pytest.raises(StoreNotFoundError, match="replaced"):
        pickle.loads(data)


def test_single_leaves_are_shared_tensors():
    assert made().view(("a",)).is_shared()


def test_stores_are_listed_and_deleted_by_name():
    first, second = (f"shm://{secrets.token_hex(4)}/{i}" for i in "ab")
    td = TensorDict({"a": torch.arange(3)}, [3])
    with td.save(first), td.save(second) as stored:
        assert first in tdstore.list_datasets("shm://")
        assert tdstore.list_datasets(first[:-1]) == [first]
        tdstore.delete(first)
        assert not tdstore.exists(first)
        assert tdstore.exists(second)
        with pytest.raises(StoreNotFoundError, match="no shared store"):
            tdstore.delete(first)
        assert stored["a"].tolist() == [0, 1, 2]


def test_the_generation_counts_commits(shm):
    with open_shared("shm://x") as store:
        assert store.generation() is None, "it has no name yet"
        store.create({("a",): F4})
        store.save_header(HEADER)
        before = store.generation()
        assert store.generation() == before is not None
        with open_shared("shm://x", mode="r+") as other:
            other.create({("b",): F4})
            assert store.generation() == before, "nothing is committed"
            other.save_header(HEADER)
            assert store.generation() == other.generation() not in (before, None)


def test_a_name_that_leads_elsewhere_has_another_generation(shm):
    with made("shm://x", 5.0) as old:
        before = old.generation()
        with made("shm://x", 5.0) as new:
            assert before not in (old.generation(), new.generation())
            assert old.generation() != old.generation() and new.generation() == new.generation()
