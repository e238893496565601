"""The two sides of a differential test, and what their results are in plain, comparable data.

Tensors are compared by dtype, shape, device and values; TensorDicts by class, batch size, names,
device, lock and entries in order; exceptions by the families that users catch.
`TDSTORE_ORACLE_SELF=1` puts the peer on both sides: it checks the cases and not tdstore.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.peer import tensordict

from .structures import SAMPLES

SELF_CHECK = os.environ.get("TDSTORE_ORACLE_SELF") == "1"

# The base of a family is what users catch; one of ours may belong to several (BatchSizeError to two).
FAMILIES: dict[str, tuple[type[Exception], ...]] = {
    "KeyError": (KeyError,),
    "IndexError": (IndexError,),
    # torch itself wavers between the two, and so does the peer.
    "RuntimeError/ValueError": (RuntimeError, ValueError),
    "TypeError": (TypeError,),
    "AttributeError": (AttributeError,),
    "OSError": (OSError,),
}
DELIBERATE = {"KeyError", "IndexError", "RuntimeError/ValueError", "TypeError"}

# The peer refuses here by stumbling, so which exception comes is chance; ours has to refuse in words.
ACCIDENT = re.compile(
    r"^AssertionError|^UnboundLocalError|^NotImplementedError: *$|tuple index out of range"
    r"|object has no attribute|is not iterable"
    r"|not subscriptable|no attribute '|unpack|positional argument|unexpected keyword|list index out of range"
    r"|Unsupported index type|object is not callable|must be tuple of ints, not|unsupported operand|bad operand"
)

# Ours never refuses like this, whichever class the exception has.
STUMBLE = re.compile(r"^AssertionError|^UnboundLocalError|(tuple|list) index out of range|'(Tensor|NoneType)' object")

# Where the peer's choice of exception is its own, ours may raise what torch and Python raise there.
LIKEWISE = {
    r"comprised between|within the range of the number of dim": "IndexError",
    r"incompatible with the tensordict shape": "IndexError",
    r"dim must be (in the range|greater)|end dimension must be greater": "IndexError",
    r"Cannot gather tensordict .* along dim": "IndexError",
    r"batch_dims==0 is not permitted|only have one ellipsis|Not enough dimensions|dimension of length": "IndexError",
    r"Only NestedKeys are supported|should be a Sequence|keys are always strings": "TypeError",
    r"got keys _TensorDictKeysView": "RuntimeError/ValueError",
    r"source is expected to be a TensorDictBase|generator raised StopIteration": "TypeError",
}


class Side:
    """One of the two implementations, and helpers that cases need."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self.name = name
        self.module = module
        self.TensorDict = module.TensorDict
        self.base = module.TensorDictBase
        self.is_peer = module is tensordict
        self.torch = torch
        self.np = np

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def td(self, *args: Any, **kwargs: Any) -> Any:
        return self.TensorDict(*args, **kwargs)

    def sample(self, name: str) -> Any:
        """A fresh TensorDict of that structure (see structures.py)."""
        return SAMPLES[name].build(self.TensorDict)

    def snap(self, value: object) -> object:
        """What `value` is now, for programs that go on to change it."""
        return Snapshot(describe(value))

    def attempt(self, program: Callable[[], object]) -> object:
        """The described result of a step that may raise."""
        return Snapshot(outcome(program, forgive=self.is_peer))


@dataclass(frozen=True)
class Snapshot:
    """Something already described."""

    description: object


@dataclass(frozen=True, eq=False)
class Raised:
    """An exception, by the families that a user can catch it as; equal if they share one."""

    families: frozenset[str]
    text: str = ""

    @classmethod
    def of(cls, error: Exception, *, forgive: bool = False) -> Raised:
        """`forgive` takes a failure inside the peer for a refusal without a particular kind."""
        families = {name for name, bases in FAMILIES.items() if isinstance(error, bases)}
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        if forgive and ACCIDENT.search(text):
            families = DELIBERATE
        elif forgive:
            families |= {also for pattern, also in LIKEWISE.items() if re.search(pattern, text)}
        elif STUMBLE.search(text):
            families = {"stumble"}
        return cls(frozenset(families or {type(error).__name__}), text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raised) and bool(self.families & other.families)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"raises {' or '.join(sorted(self.families))} ({self.text})"


def raises(family: str) -> Raised:
    assert family in FAMILIES, family
    return Raised(frozenset({family}))


@dataclass(frozen=True, eq=False)
class Values:
    """A tensor, compared by everything that a user can see of it."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values):
            return False
        a, b = self.tensor, other.tensor
        if (a.dtype, a.shape, a.device, a.requires_grad) != (b.dtype, b.shape, b.device, b.requires_grad):
            return False
        a, b = a.detach(), b.detach()
        if a.is_floating_point() or a.is_complex():
            # One fused kernel and a loop over leaves may round differently in the last place.
            return torch.allclose(a, b, rtol=1e-6, atol=0.0, equal_nan=True)
        return torch.equal(a, b)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        t = self.tensor
        values = t.detach().flatten().tolist()
        shown = f"{values[:12]}{'...' if len(values) > 12 else ''}"
        return f"{str(t.dtype)[6:]}{list(t.shape)}{'' if t.device.type == 'cpu' else t.device} {shown}"


def describe(value: object) -> object:
    """Plain, comparable data that says what `value` is."""
    if isinstance(value, Snapshot):
        return value.description
    kind = type(value).__name__
    if kind == "NonTensorData" or kind.startswith("MetaData"):
        return {"kind": kind, "batch_size": list(value.batch_size), "data": describe(value.data)}  # type: ignore[attr-defined]
    if kind == "NonTensorStack":
        return {"kind": kind, "batch_size": list(value.batch_size), "data": describe(value.tolist())}  # type: ignore[attr-defined]
    if isinstance(value, _BASES):
        return _describe_td(value)
    if not isinstance(value, type) and (tensordict.is_tensorclass(value) or OURS.is_tensorclass(value)):
        return {"tensorclass": kind, **_describe_td(value._tensordict)}  # type: ignore[attr-defined]
    if isinstance(value, torch.Tensor):
        return Values(value.detach().clone().requires_grad_(value.requires_grad))
    if isinstance(value, np.ndarray):
        return ("ndarray", str(value.dtype), value.shape, value.tolist())
    if isinstance(value, torch.Size):
        return ("Size", *value)
    if isinstance(value, (torch.device, torch.dtype)):
        return (type(value).__name__, str(value))
    if isinstance(value, Mapping):
        return {"keys": [str(k) for k in value], **{str(k): describe(v) for k, v in value.items()}}
    if isinstance(value, tuple):
        return tuple(describe(v) for v in value)
    if isinstance(value, list):
        return [describe(v) for v in value]
    if isinstance(value, type):
        return f"class {value.__name__}"
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex, slice)):
        return value
    if isinstance(value, Iterator):
        return ["iterator", *map(describe, value)]
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):  # a view of keys, values or items
        return ["view", *map(describe, value)]
    return (kind, value)


def _describe_td(td: Any) -> dict[str, object]:
    keys = list(td.keys())
    return {
        "kind": type(td).__name__,
        "batch_size": ("Size", *td.batch_size),
        "names": list(td.names),
        "device": None if td.device is None else str(td.device),
        "locked": td.is_locked,
        "keys": keys,
        **{f".{key}": describe(td.get(key)) for key in keys},
    }


def outcome(program: Callable[[], object], *, forgive: bool = False) -> object:
    """The described result of `program`, or what it raised (`forgive=True` for the peer's)."""
    with warnings.catch_warnings():
        if forgive:
            warnings.simplefilter("ignore")
        try:
            return describe(program())
        except Exception as error:
            return Raised.of(error, forgive=forgive)


def differences(want: object, got: object, at: str = "result") -> Iterator[str]:
    """Where two descriptions differ, one line a place."""
    if isinstance(want, dict) and isinstance(got, dict):
        for key in dict.fromkeys([*want, *got]):
            if key not in got or key not in want:
                yield f"{at}[{key!r}]: {'missing in ours' if key not in got else 'only in ours'}"
            else:
                yield from differences(want[key], got[key], f"{at}[{key!r}]")
    elif isinstance(want, (list, tuple)) and type(want) is type(got) and len(want) == len(got):  # type: ignore[arg-type]
        for i, (a, b) in enumerate(zip(want, got, strict=True)):  # type: ignore[call-overload]
            yield from differences(a, b, f"{at}[{i}]")
    elif type(want) is not type(got) or not (want == got or (want != want and got != got)):
        yield f"{at}: expected {want!r}, got {got!r}"


def _ours() -> ModuleType:
    if SELF_CHECK:
        return tensordict
    import tdstore

    return tdstore


PEER = Side("peer", tensordict)
OURS = Side("ours", _ours())
_BASES = (PEER.base, OURS.base)
