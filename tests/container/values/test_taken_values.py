"""Rows of values are fetched when somebody looks at them, and nobody can tell."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tdstore import NonTensorStack, TensorDict
from tdstore.container.values import lazy_gather
from tdstore.container.values.lazy_gather import MANY, GatherRegistry

N = 4 * MANY
ROWS = torch.arange(N).flip(0)[: 2 * MANY]
WANT = [f"v{i}" for i in ROWS.tolist()]


class Value:
    """Something that a weak reference can watch."""


def batch() -> TensorDict:
    return TensorDict({"s": [f"v{i}" for i in range(N)], "x": torch.arange(N)}, [N])


def test_positions_of_many_values_are_not_kept():
    assert lazy_gather.counted(64) is lazy_gather.counted(64)
    many = lazy_gather.counted(1_000_000)
    assert many[-1] == 999_999
    gone = weakref.ref(many)
    del many
    assert gone() is None


def test_nothing_is_fetched_before_somebody_looks():
    looked = []

    class Watched(list):
        def __getitem__(self, i):
            looked.append(i)
            return super().__getitem__(i)

    stack = NonTensorStack.from_list([f"v{i}" for i in range(N)])
    taken = stack._gathers.gather(Watched(stack.flat()), ROWS)
    assert not looked and len(taken) == len(WANT)
    assert taken[0] == WANT[0] and looked == ROWS.tolist()
    assert list(taken) == WANT and len(looked) == len(WANT)  # once


WRITES = {
    "a row": lambda td: td.__setitem__(N - 1, TensorDict({"s": "new", "x": 0}, [])),
    "a row of a view": lambda td: td[N // 2 :].__setitem__(-1, TensorDict({"s": "new", "x": 0}, [])),
    "the stack": lambda td: td.get("s").__setitem__(N - 1, "new"),
    "its list": lambda td: td["s"].__setitem__(N - 1, "new"),
    "rows": lambda td: td.__setitem__(ROWS[:1], TensorDict({"s": ["new"], "x": [0]}, [1])),
    "update_": lambda td: td.update_({"s": ["new"] * N}),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_what_was_taken_stays_when_the_source_is_written(write):
    td = batch()
    taken, of_view, again = td[ROWS], td[N // 2 :][ROWS - N // 2], td[ROWS][torch.arange(2 * MANY)]
    write(td)
    assert td["s"][N - 1] == "new"
    for part in (taken, of_view, again):
        assert list(part["s"]) == WANT


def test_what_is_written_into_what_was_taken_is_its_own():
    td = batch()
    taken, rival = td[ROWS], td[ROWS]
    view = taken[1:]
    further = taken[torch.arange(2 * MANY)]
    view[0] = TensorDict({"s": "new", "x": 7}, [])
    assert list(taken["s"]) == [WANT[0], "new", *WANT[2:]]
    assert list(further["s"]) == list(rival["s"]) == WANT
    assert list(td["s"]) == [f"v{i}" for i in range(N)]


def test_a_few_rows_do_not_keep_all_the_others():
    values = [Value() for _ in range(N)]
    kept = weakref.ref(values[int(ROWS[0])])
    others = [weakref.ref(value) for i, value in enumerate(values) if i not in ROWS.tolist()]
    td = TensorDict({"s": NonTensorStack.from_list(values)}, [N])
    del values
    part = td[ROWS]
    view = td[:1]
    del td
    gc.collect()
    assert all(ref() is not None for ref in others)  # a view is left
    del view
    gc.collect()
    assert all(ref() is None for ref in others)
    assert kept() is part["s"][0]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_and_pickles(how):
    td = batch()
    source, taken = td.get("s"), td[ROWS].get("s")
    other = how(taken)
    assert other.tolist() == WANT == taken.tolist()
    copied = how(source)
    late = copied[ROWS]
    source[N - 1] = "new"
    assert late.tolist() == WANT
    assert copied[N - 1].data == ("new" if how is copy.copy else f"v{N - 1}")


def test_writers_and_takers_in_threads():
    td = batch()
    stop, wrong = threading.Event(), []

    def take():
        while not stop.is_set():
            part = td[ROWS]
            values = list(part["s"])
            if [v.split("/")[0] for v in values] != WANT or list(part["s"]) != values:
                wrong.append(values)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for k in range(300):
        td.get("s")[N - 1] = f"v{N - 1}/{k}"
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_several_that_look_at_once_see_one_list():
    """Else what one of them then writes would be lost."""

    class Slow(list):
        def __getitem__(self, i):
            time.sleep(0.001)
            return super().__getitem__(i)

    taken = GatherRegistry().gather(Slow(f"v{i}" for i in range(N)), ROWS)
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(lambda _: taken.values(), range(3))
    assert first == WANT
    assert all(other is first for other in others)


def test_functions_of_torch_do_not_reach_the_ways_of_a_stack():
    with pytest.raises(TypeError):
        torch.take(NonTensorStack.from_list([["a", "b"], ["c", "d"]]), torch.tensor([3]))  # of all elements, not rows


def test_many_that_are_gone_are_forgotten():
    stack = batch().get("s")
    held = [stack[ROWS] for _ in range(10)]
    for _ in range(1000):
        stack[ROWS]
    assert len(stack._gathers._pending) < 200
    stack[N - 1] = "new"
    assert all(part.tolist() == WANT for part in held) and not stack._gathers._pending


def test_the_end_of_the_interpreter_is_silent(monkeypatch: pytest.MonkeyPatch):
    """Objects of the main module may go after the modules that they need were emptied."""
    stack = NonTensorStack.from_list([f"v{i}" for i in range(N)])
    taken = stack._gathers.gather(stack.flat(), ROWS)
    monkeypatch.setattr(lazy_gather, "sys", None)
    with pytest.MonkeyPatch.context() as unraisable:
        failures: list[object] = []
        unraisable.setattr("sys.unraisablehook", failures.append)
        del stack
        gc.collect()
    assert not failures
    assert list(taken) == WANT
