"""Helpers for keys, shapes and options, under the path that code imports them from."""

from __future__ import annotations

from math import prod

from torch.nn import Buffer

from tdstore.container.core.paths import (
    is_nested_key,
    is_seq_of_nested_key,
    unravel_key,
    unravel_key_list,
    unravel_key_to_tuple,
)
from tdstore.container.core.paths import unravel_key as unravel_keys
from tdstore.container.core.paths import (
    unravel_key_to_tuple as _unravel_key_to_tuple,  # noqa: F401 - torchrl and BenchMARL import this name
)
from tdstore.container.display.options import get_printoptions, set_printoptions
from tdstore.container.functions.broadcast import expand_as_right, expand_right
from tdstore.container.functions.compare import assert_allclose_td, assert_close
from tdstore.container.functions.construct_and_join import lazy_legacy, set_lazy_legacy
from tdstore.container.values.linked_lists import LinkedList
from tdstore.convert.objects.pytree import is_namedtuple, is_namedtuple_class
from tdstore.convert.objects.reprs import parse_tensor_dict_string
from tdstore.index.shapes import convert_ellipsis_to_idx, infer_size_impl
from tdstore.io.filetree import print_directory_tree
from tdstore.lifetime import logger
from tdstore.settings import (
    capture_non_tensor_stack,
    list_to_stack,
    set_capture_non_tensor_stack,
    set_list_to_stack,
    strtobool,
)
from tdstore.tensorclass.making import is_tensorclass
from tdstore.tensordicts.deduplicate import isin, remove_duplicates
from tdstore.tensordicts.kinds import is_non_tensor
from tdstore.types import NestedKey

__all__ = [
    "Buffer",
    "LinkedList",
    "NestedKey",
    "assert_allclose_td",
    "assert_close",
    "capture_non_tensor_stack",
    "convert_ellipsis_to_idx",
    "expand_as_right",
    "expand_right",
    "get_printoptions",
    "infer_size_impl",
    "is_namedtuple",
    "is_namedtuple_class",
    "is_nested_key",
    "is_non_tensor",
    "is_seq_of_nested_key",
    "is_tensorclass",
    "isin",
    "lazy_legacy",
    "list_to_stack",
    "logger",
    "parse_tensor_dict_string",
    "print_directory_tree",
    "prod",
    "remove_duplicates",
    "set_capture_non_tensor_stack",
    "set_lazy_legacy",
    "set_list_to_stack",
    "set_printoptions",
    "strtobool",
    "unravel_key",
    "unravel_key_list",
    "unravel_key_to_tuple",
    "unravel_keys",
]
