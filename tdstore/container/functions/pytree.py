"""TensorDicts as nodes of `torch.utils._pytree`: `tree_map` over them, `torch.func`, `torch.export`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from tdstore.container.core.container import Container
from tdstore.container.storage.value_records import from_json
from tdstore.container.values.linked_lists import LinkedList
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.index.shapes import common_prefix
from tdstore.index.tracing import symbolic

NO_KEY = ""
"""Stands among the keys of a node for a tensor that is no entry."""


class Node(NamedTuple):
    """Structure of a TensorDict beside its entries. Two are equal if `tree_map` may traverse both side by side.

    A named tuple, since a compiled function makes such a thing again, and no object of a class.
    """

    keys: tuple[str, ...]
    batch_size: torch.Size
    """With -1 for each length that is symbolic: the entries have it in their shapes."""
    names: tuple[str | None, ...] | None
    device: torch.device | None
    values: dict[str, NonTensor]
    order: tuple[str, ...] = ()
    """All keys, those of `values` included."""
    ndims: tuple[int, ...] = ()
    """Number of dimensions of each entry."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        alike = (self.keys, len(self.batch_size), self.names) == (other.keys, len(other.batch_size), other.names)
        if not alike or self.values.keys() != other.values.keys():
            return False
        return all(_same(value, other.values[key]) for key, value in self.values.items())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def dump(self) -> dict[str, Any]:
        """Serialize to JSON."""
        return {
            "keys": list(self.keys),
            "batch_size": list(self.batch_size),
            "names": None if self.names is None else list(self.names),
            "device": None if self.device is None else str(self.device),
            "values": {k: {"shape": list(v.batch_size), **v.to_json()} for k, v in self.values.items()},
            "order": list(self.order),
            "ndims": list(self.ndims),
        }

    @classmethod
    def load(cls, dumped: Any) -> Node:
        """Parse JSON."""
        names, device = dumped["names"], dumped["device"]
        return cls(
            tuple(dumped["keys"]),
            torch.Size(dumped["batch_size"]),
            None if names is None else tuple(names),
            None if device is None else torch.device(device),
            {k: from_json(v, torch.Size(v["shape"])) for k, v in dumped["values"].items()},
            tuple(dumped["order"]),
            tuple(dumped["ndims"]),
        )


def _same(a: NonTensor, b: NonTensor) -> bool:
    """Check whether two entries hold the same values; the lengths of their batches may differ."""
    if isinstance(a, NonTensorData) and isinstance(b, NonTensorData):
        return a.ndim == b.ndim and NonTensorData(a.data).same(NonTensorData(b.data))
    return a is b or a.same(b)


def _flatten_stored(td: Any) -> tuple[list[Any], Node]:
    """Flatten what is read: outside of `torch.func` transforms, which wrap each tensor that is made under them."""
    with temporarily_clear_interpreter_stack():
        read = td._resident()
    return _flatten(read)


def _flatten(td: Any) -> tuple[list[Any], Node]:
    data: dict[str, Any] = td._data
    keys = tuple([k for k, v in data.items() if isinstance(v, Tensor) or not isinstance(v, NonTensor)])
    values = {k: v for k, v in data.items() if isinstance(v, NonTensor) and not isinstance(v, Tensor)}
    order = tuple(data) if values else keys
    children = [data[k] for k in keys]
    batch = td._batch_size
    if symbolic(batch):
        if not children:  # a tensor that has the lengths in its shape
            keys, children = (NO_KEY,), [torch.zeros((*batch, 0), device="cpu")]
        batch = torch.Size((-1,) * len(batch))
        values = {k: _fitted(v, torch.Size(())) for k, v in values.items()}
    ndims = tuple([getattr(child, "ndim", 0) for child in children])
    return children, Node(keys, batch, td._names, td._device, values, order, ndims)


def _unflatten(children: Iterable[Any], node: Node) -> Any:
    """Rebuild the TensorDict around new entries, which need not be tensors.

    The batch size stays where all entries still start with it. Else it is what they share of their shapes, with
    as many dimensions more or less as all of them have now.
    """
    found = dict(zip(node.keys, children, strict=True))
    batch, names, device = node.batch_size, node.names, node.device
    shapes = [v.shape if isinstance(v, (Tensor, Container)) else () for v in found.values()]
    known = -1 not in batch and not any(symbolic(shape) for shape in shapes)
    if not known and node.ndims == tuple(map(len, shapes)):  # no comparison of lengths, which would fix them
        batch = torch.Size(shapes[0][: len(batch)])
    if any(shape[: len(batch)] != batch for shape in shapes):
        more = {len(shape) - n for shape, n in zip(shapes, node.ndims, strict=True)}
        # Derivatives are TensorDicts of the batch where tensors were.
        derived = min(more, default=0) < 0 and any(isinstance(v, Container) for v in found.values())
        n = len(batch) if derived or len(more) != 1 else max(0, len(batch) + more.pop())
        batch, names = common_prefix([shape[:n] for shape in shapes]), None
    if device is not None and any(getattr(v, "device", None) != device for v in found.values()):
        device = None
    for key, value in node.values.items():
        found[key] = value if batch == node.batch_size else _fitted(value, batch)
    return Container._resident_class._new({k: found[k] for k in node.order}, batch, device, names)


def _unflatten_params(children: Iterable[Any], node: Node) -> Any:
    """Rebuild as `_unflatten`, as parameters of a module where there are some."""
    made = _unflatten(children, node)
    if torch.compiler.is_compiling() or not _has_parameters(made):
        return made
    params = Container._params_class(made, no_convert=True)
    params.no_convert = False
    return params


def _has_parameters(td: Any) -> bool:
    return any(
        isinstance(v, torch.nn.Parameter) or (isinstance(v, Container) and _has_parameters(v))
        for v in td._data.values()
    )


def _fitted(value: NonTensor, batch: torch.Size) -> NonTensor:
    made = value.for_batch(batch)
    return value if made is None else made


def _with_keys(td: Any) -> tuple[list[tuple[Any, Any]], Node]:
    children, node = (_flatten_stored if isinstance(td, Container._stored_class) else _flatten)(td)
    return [(pytree.MappingKey(k), v) for k, v in zip(node.keys, children, strict=True)], node


def _flatten_stack(td: Any) -> tuple[list[Any], Any]:
    return list(td._tds), (td._stack_dim, td._dim_name, tuple(td._empty_batch_size))


def _unflatten_stack(tds: Iterable[Any], context: Any) -> Any:
    dim, name, empty_batch_size = context
    return Container._stack_class._of(list(tds), dim, name, torch.Size(empty_batch_size))


def _stack_with_keys(td: Any) -> tuple[list[tuple[Any, Any]], Any]:
    children, context = _flatten_stack(td)
    return [(pytree.SequenceKey(i), child) for i, child in enumerate(children)], context


def _value_context(value: NonTensor) -> tuple[list[Any], Any]:
    return [], Node((), torch.Size(()), None, None, {"data": value}, ("data",))


def _value_from(children: Iterable[Any], node: Node) -> NonTensor:
    return node.values["data"]


def register_wrapper(cls: type, inner: Callable[[Any], Any], around: Callable[[Any, Any], Any]) -> None:
    """Register a class whose objects wrap a TensorDict, with the TensorDict as its only child.

    Args:
        inner: gives the TensorDict of an object.
        around: makes an object of a TensorDict and the class.
    """
    pytree.register_pytree_node(
        cls,
        lambda value: ([inner(value)], None),
        lambda children, _: around(next(iter(children)), cls),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=lambda value: ([(pytree.GetAttrKey("_tensordict"), inner(value))], None),
    )


def register_nodes() -> None:
    """Register every container; what is stored is read when it is flattened, and comes back as a TensorDict."""
    if Container._resident_class in pytree.SUPPORTED_NODES:
        return
    for cls in (Container._resident_class, Container._stored_class, Container._params_class):
        pytree.register_pytree_node(
            cls,
            _flatten_stored if cls is Container._stored_class else _flatten,
            _unflatten_params if cls is Container._params_class else _unflatten,
            serialized_type_name=f"tdstore.{cls.__name__}",
            to_dumpable_context=Node.dump,
            from_dumpable_context=Node.load,
            flatten_with_keys_fn=_with_keys,
        )
    pytree.register_pytree_node(
        Container._stack_class,
        _flatten_stack,
        _unflatten_stack,
        serialized_type_name="tdstore.LazyStackedTensorDict",
        to_dumpable_context=list,
        from_dumpable_context=lambda dumped: (dumped[0], dumped[1], tuple(dumped[2])),
        flatten_with_keys_fn=_stack_with_keys,
    )
    pytree.register_pytree_node(
        LinkedList,
        lambda values: (list(values), None),
        lambda values, _: list(values),
        serialized_type_name="tdstore.LinkedList",
        flatten_with_keys_fn=lambda values: ([(pytree.SequenceKey(i), v) for i, v in enumerate(values)], None),
    )
    for kind in (NonTensorData, NonTensorStack):
        pytree.register_pytree_node(
            kind,
            _value_context,
            _value_from,
            serialized_type_name=f"tdstore.{kind.__name__}",
            to_dumpable_context=Node.dump,
            from_dumpable_context=Node.load,
            flatten_with_keys_fn=lambda value: ([], _value_context(value)[1]),
        )
