"""Print options: what `repr` of a container shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from typing import Any, Self

from tdstore.errors import InvalidTypeError

_DEFAULTS: dict[str, Any] = {
    "show_batch_size": True,
    "show_device": True,
    "show_is_shared": True,
    "show_shape": True,
    "show_field_device": True,
    "show_dtype": True,
    "show_field_is_shared": True,
    "show_grad": False,
    "show_is_contiguous": False,
    "show_is_view": False,
    "show_storage_size": False,
    "plain": False,
    "sort_keys": "alphabetical",
    "compact": False,
    "html": True,
}
_TERSE = ("show_device", "show_is_shared", "show_field_device", "show_dtype", "show_field_is_shared")
_LONG_ONLY = (
    "show_is_shared",
    "show_shape",
    "show_field_device",
    "show_field_is_shared",
    "show_grad",
    "show_is_contiguous",
    "show_is_view",
    "show_storage_size",
    "plain",
)
_now = dict(_DEFAULTS)


def get_printoptions() -> dict[str, Any]:
    """Return the present options of `set_printoptions`."""
    return dict(_now)


class set_printoptions(ContextDecorator):  # noqa: N801  # the name that users know
    """Choose what `repr` of TensorDicts shows: in a `with` block, as a decorator, or with `.set()` for good.

    Args:
        verbose: False leaves out devices, dtypes and what is shared.
        **kwargs: `show_batch_size`, `show_device`, `show_is_shared` of a TensorDict; `show_shape`,
            `show_field_device`, `show_dtype`, `show_field_is_shared` of its tensors, and of those in memory
            `show_grad`, `show_is_contiguous`, `show_is_view`, `show_storage_size`, and `plain` for mean and
            standard deviation, or the range of integers; `sort_keys`: "alphabetical", None, or a function of the
            line of an entry, by which they are sorted; `compact`: True for a short form, on one line where that fits,
            which heeds `show_batch_size`, `show_device`, `show_dtype` and `sort_keys`; the options that it does not
            heed set it to False where it is not given; `html`: False has notebooks show the text.

    Raises:
        InvalidTypeError: an option that does not exist.

    Example:
        >>> with set_printoptions(verbose=False):
        ...     print(TensorDict({"a": torch.zeros(3)}, [3]))
        TensorDict(
            fields={
                a: Tensor(shape=torch.Size([3]))},
            batch_size=torch.Size([3]))
        >>> with set_printoptions(compact=True):
        ...     print(TensorDict({"a": torch.zeros(3, 4)}, [3]))
        TensorDict(batch_size=[3], fields={a: f32[4]})
    """

    def __init__(self, *, verbose: bool = True, **kwargs: Any) -> None:
        if unknown := set(kwargs) - set(_DEFAULTS):
            raise InvalidTypeError(f"no print options: {sorted(unknown)}; there are {sorted(_DEFAULTS)}")
        self._options = {**({} if verbose else dict.fromkeys(_TERSE, False)), **kwargs}
        if not kwargs.keys().isdisjoint(_LONG_ONLY):
            self._options.setdefault("compact", False)
        self._before: list[dict[str, Any]] = []

    def set(self) -> None:
        """Set the options, for good or until `__exit__`."""
        self._before.append(dict(_now))
        _now.update(self._options)

    def __enter__(self) -> Self:
        self.set()
        return self

    def __exit__(self, *error: object) -> None:
        _now.update(self._before.pop())


def shows(option: str) -> bool:
    """Return whether an option is on."""
    return bool(_now[option])


def line_order() -> Callable[[str], Any] | None:
    """Return the function of an entry's line by which entries are sorted; None for the order of the keys."""
    order = _now["sort_keys"]
    return str if order == "alphabetical" else order if callable(order) else None


def ordered_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines of entries in the order to show them."""
    order = line_order()
    return list(lines) if order is None else sorted(lines, key=order)


def facts_of(td: Any) -> list[str]:
    """Return what the compact form says of a container besides its entries."""
    size = ",".join(map(str, td.batch_size))
    return [
        *([f"batch_size=[{size}]"] if _now["show_batch_size"] else []),
        *([f"device={td.device}"] if _now["show_device"] and td.device is not None else []),
    ]


def level_lines(td: Any) -> list[str]:
    """Return the lines of a level below its entries."""
    lines = []
    if _now["show_batch_size"]:
        lines.append(f"batch_size={td.batch_size!r}")
    if _now["show_device"]:
        lines.append(f"device={td.device}")
    if _now["show_is_shared"]:
        lines.append(f"is_shared={td.is_shared()}")
    return lines


def leaf_parts(td: Any, key: str) -> tuple[str, list[str]]:
    """Return the class name of a tensor and its description. A stored one is not read."""
    shape, device, dtype, shared, name = td._leaf_facts(key)
    said = {
        "show_shape": f"shape={shape!r}",
        "show_field_device": f"device={device}",
        "show_dtype": f"dtype={dtype}",
        "show_field_is_shared": f"is_shared={shared}",
    }
    parts = [text for option, text in said.items() if _now[option]]
    if any(_now[option] for option in _LIVE) and isinstance(td, td._resident_class):
        leaf = td._raw(key)
        parts += [text(leaf) for option, text in _LIVE.items() if _now[option]]
    return name, parts


def _moments(leaf: Any) -> str:
    leaf = leaf.detach()
    if not leaf.numel() or leaf.is_complex():
        return f"{leaf.numel()} elements"
    if not leaf.is_floating_point():
        return f"min={leaf.min().item()}, max={leaf.max().item()}"
    wide = leaf.double()
    return f"mean={wide.mean().item():.4g}, std={wide.std(correction=int(wide.numel() > 1)).item():.4g}"


_LIVE: dict[str, Any] = {
    "show_grad": lambda leaf: f"requires_grad={leaf.requires_grad}",
    "show_is_contiguous": lambda leaf: f"is_contiguous={leaf.is_contiguous()}",
    "show_is_view": lambda leaf: f"is_view={leaf._is_view()}",
    "show_storage_size": lambda leaf: f"storage_size={leaf.untyped_storage().nbytes()}",
    "plain": _moments,
}
