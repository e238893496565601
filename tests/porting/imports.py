"""What other libraries import from `tensordict`, read from their sources by `ast`.

From the released torchrl 0.14.1, AgileRL 2.58.0, verl 0.9.1, rl4co 0.7.0, BenchMARL 1.5.2 and rsl_rl 5.5.1, their
examples and tests as far as the releases have them, and what the documentation of `tensordict` names beside. A name
without its module is one of the top level.
"""

from __future__ import annotations

IMPORTS: dict[str, dict[str, str]] = {
    "tensordict": {
        "LazyStackedTensorDict MemoryMappedTensor MetaData NestedKey NonTensorData NonTensorStack": "torchrl, verl",
        "PersistentTensorDict TensorClass TensorDict TensorDictBase TensorDictParams": "torchrl, AgileRL, verl",
        "from_module is_leaf_nontensor is_non_tensor is_tensor_collection is_tensorclass": "torchrl, AgileRL",
        "lazy_stack list_to_stack make_tensordict maybe_dense_stack merge_tensordicts pad": "torchrl",
        "set_capture_non_tensor_stack set_lazy_legacy set_list_to_stack": "torchrl, verl",
        "tensorclass unravel_key unravel_key_list": "torchrl",
        "__version__ from_consolidated load save": "torchrl, verl: as attributes",
    },
    "tensordict.base": {
        "NO_DEFAULT TensorDictBase": "torchrl, verl",
        "_is_leaf_nontensor": "torchrl",
        "get_defaults_to_none set_get_defaults_to_none is_tensor_collection": "documentation",
        "LinkedList MemoryMappedTensor expand_as_right is_non_tensor unravel_key unravel_key_list": "public there",
    },
    "tensordict.functional": {
        "dense_stack_tds make_tensordict merge_tensordicts pad pad_sequence": "documentation",
    },
    "tensordict.memmap": {"MemoryMappedTensor": "torchrl"},
    "tensordict.nn": {"TensorDictParams": "torchrl"},
    "tensordict.persistent": {"PersistentTensorDict": "torchrl"},
    "tensordict.store": {
        "TensorDictStore": "torchrl",
        "LazyStackedTensorDictStore": "documentation",
    },
    "tensordict.tensorclass": {
        "NonTensorData NonTensorStack": "torchrl, verl",
        "TensorClass from_dataclass is_non_tensor": "torchrl",
        "MetaData is_tensorclass tensorclass": "documentation",
    },
    "tensordict.tensordict": {
        "TensorDict": "rl4co",
        "LazyStackedTensorDict MemoryMappedTensor NO_DEFAULT NestedKey TensorDictBase": "public there",
        "assert_allclose_td dense_stack_tds expand_as_right expand_right is_tensor_collection": "public there",
        "is_tensorclass make_tensordict merge_tensordicts pad pad_sequence": "public there",
    },
    "tensordict.utils": {
        "_unravel_key_to_tuple": "torchrl, BenchMARL",
        "Buffer NestedKey expand_as_right expand_right is_non_tensor is_seq_of_nested_key": "torchrl",
        "is_tensorclass logger set_lazy_legacy unravel_key print_directory_tree": "torchrl",
        "assert_allclose_td assert_close isin remove_duplicates LinkedList is_nested_key": "documentation",
        "unravel_key_list capture_non_tensor_stack lazy_legacy list_to_stack": "documentation",
        "set_capture_non_tensor_stack": "documentation",
        "set_list_to_stack get_printoptions set_printoptions parse_tensor_dict_string": "documentation",
        "convert_ellipsis_to_idx infer_size_impl is_namedtuple is_namedtuple_class prod strtobool": "public there",
        "unravel_keys": "public there",
    },
}

LEFT_OUT: dict[str, tuple[str, ...]] = {
    "modules on TensorDicts, which are no part of this package": (
        "tensordict.nn: CompositeDistribution CudaGraphModule InteractionType NormalParamExtractor"
        " ProbabilisticTensorDictModule ProbabilisticTensorDictSequential TensorDictModule TensorDictModuleBase"
        " TensorDictModuleWrapper TensorDictSequential composite_lp_aggregate dispatch set_composite_lp_aggregate"
        " set_skip_existing",
        "tensordict.nn.common: TensorDictModuleBase",
        "tensordict.nn.distributions: Delta",
        "tensordict.nn.functional_modules: _exclude_td_from_pytree",
        "tensordict.nn.probabilistic: InteractionType ProbabilisticTensorDictSequential _use_generator"
        " interaction_type set_interaction_type",
        "tensordict.nn.utils: _set_dispatch_td_nn_modules _set_skip_existing_None biased_softplus expln inv_softplus"
        " mappings",
    ),
    "private names": (
        "tensordict: _pytree",
        "tensordict._tensorcollection: TensorCollection",
        "tensordict.base: _ACCEPTED_CLASSES _NESTED_TENSORS_AS_LISTS _default_is_leaf",
        "tensordict.utils: _getitem_batch_size _is_non_tensor _is_tensorclass _maybe_correct_neg_dim _shape"
        " _zip_strict",
    ),
}

LEFT_OUT_15 = {("tensordict.base", "LinkedList")}
"""Names that the peer has no longer there since 0.15."""
