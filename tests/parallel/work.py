"""What the workers of the tests run: by module, so that spawned processes find it."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

from tdstore import TensorDict
from tdstore.container.distribute import row_tasks


def plus_one(td):
    return td + 1


def lengths(td):
    return torch.full(td.shape, td.shape[0] if td.batch_dims else -1)


def first_leaf(td):
    return td["a"] * 2


def doubled_rows(td):
    return torch.cat([td, td])


def nothing(td):
    return None


def now_and_then(td):
    return None if int(td["a"].flatten()[0]) else td


def a_string(td):
    return "x"


def key_error(td):
    raise KeyError("boom")


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def odd_error(td):
    raise Odd(1, 2)


def value_error_at_five(td):
    if 5 in td["a"].flatten().tolist():
        raise ValueError("five")
    return td


def unpicklable(td):
    return threading.Lock()


def seeds(td):
    time.sleep(0.05)  # so that each worker gets its share
    return TensorDict(
        {"seed": torch.full(td.shape, torch.initial_seed()), "pid": torch.full(td.shape, os.getpid())}, td.shape
    )


def threads(td):
    return torch.full(td.shape, torch.get_num_threads())


def pids(td):
    return torch.full(td.shape, os.getpid())


def change_in_place(td):
    td["a"].add_(100)


def with_new_key(td):
    td["n"] = td["a"] * 2
    return td


def killed(td):
    if int(td["a"].flatten()[0]) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return td


def leaves_quietly(td):
    os._exit(0)


def other_key(td):
    return TensorDict({"z": td["a"]}, td.batch_size)


def opened(td):
    """How many containers this worker holds open."""
    return torch.full(td.shape, len(row_tasks._open))


def kind(td):
    return torch.full(td.shape, int(type(td) is TensorDict))


def names_and_values(td):
    assert td.names == ["t"]
    assert len(td["s"]) == len(td)
    return td
