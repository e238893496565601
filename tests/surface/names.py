"""The public names that users of the tensordict package know; every container has all of them."""

# One section a line: what the 270 documented methods are about, then the later ones.
NAMES = """
construction: clone contiguous copy copy_ copy_at_ empty from_dict from_dict_instance from_h5 from_module from_modules
    from_namedtuple from_pytree fromkeys is_contiguous new_empty new_full new_ones new_tensor new_zeros replace
    to_tensordict
access: entry_class get get_at get_item_shape get_non_tensor is_empty items keys non_tensor_items sorted_keys values
update: apply apply_ clear del_ fill_ filter_empty_ filter_non_tensor_data masked_fill masked_fill_ named_apply pop
    popitem rename_key_ rename_keys set set_ set_at_ set_non_tensor setdefault update update_ update_at_ where zero_
shape: auto_batch_size_ batch_dims batch_size cat chunk depth dim expand expand_as flatten gather ndim ndimension numel
    permute reshape shape size split squeeze stack transpose unbind unflatten unsqueeze view
index: masked_select
reduction: all any mean nanmean nansum norm prod std sum var
casting: dtype type bfloat16 bool complex128 complex32 complex64 double float float16 float32 float64 half int int16
    int32 int64 int8 uint8 uint16 uint32 uint64 qint32 qint8 quint4x2 quint8
device: clear_device_ cpu cuda data detach detach_ device grad pin_memory pin_memory_ requires_grad_ to zero_grad
locking: lock_ unlock_
names: names refine_names rename rename_
keys: create_nested exclude flatten_keys pack select split_keys unflatten_keys
lazy: lazy_stack maybe_dense_stack
memmap: dumps is_memmap load load_ load_memmap load_memmap_ make_memmap make_memmap_from_storage
    make_memmap_from_tensor memmap memmap_ memmap_like memmap_refresh_ save saved_path
shared: is_shared share_memory_
h5: close to_h5
state: load_state_dict state_dict
consolidation: consolidate is_consolidated
modules: to_module
python: numpy to_dict to_namedtuple to_padded_tensor to_pytree
distributed: gather_and_stack irecv isend recv reduce send
map: map map_iter
unary: abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round
    sigmoid sign sin sinh sqrt tan tanh trunc isfinite isnan isneginf isposinf isreal
unary in place: abs_ acos_ asin_ atan_ ceil_ cos_ cosh_ erf_ erfc_ exp_ expm1_ floor_ frac_ lgamma_ log_ log10_ log1p_
    log2_ neg_ reciprocal_ round_ sigmoid_ sign_ sin_ sinh_ sqrt_ tan_ tanh_ trunc_
binary: add sub mul div pow maximum minimum clamp_max clamp_min lerp addcdiv addcmul add_ sub_ mul_ div_ pow_ maximum_
    minimum_ clamp_max_ clamp_min_ lerp_ addcdiv_ addcmul_
storage, later: from_schema from_zarr to_zarr to_store from_consolidated is_locked bytes from_any from_list tolist
tables, later: to_struct_array from_struct_array to_parquet from_parquet to_pandas from_pandas to_csv from_csv to_json
    from_json to_mds from_dataclass from_tuple init_remote from_remote_init broadcast pad repeat densify to_lazystack
    data_ptr scatter narrow tensor_split separates record_stream attrs
maths, later: all_gather all_reduce amax amin arecv as_tensor asend atleast_1d atleast_2d atleast_3d auto_device_
    backward bitwise_and broadcast_to cat_from_tensordict cat_tensors clamp clear_refs_for_compile_ cummax cummin flip
    fliplr flipud is_cpu is_cuda is_floating_point is_meta is_non_tensor logical_and logsumexp max min mod moveaxis
    movedim param_count quantile repeat_interleave requires_grad roll rot90 rsub softmax stack_from_tensordict
    stack_tensors swapaxes swapdims tile
ours: append astype_ extend permute_features_ resize_ read commit transaction verify
"""

FUNCTIONS = """
    TensorDict TensorDictBase LazyStackedTensorDict PersistentTensorDict TensorDictStore LazyStackedTensorDictStore
    TypedTensorDict UnbatchedTensor MetaData NonTensorData NonTensorDataBase NonTensorStack TensorAttrs TensorClass
    TensorDictParams MemoryMappedTensor pack_memmap unpack_memmap is_memmap_archive refresh_archive_checksums load
    load_memmap memmap save from_h5 from_zarr from_consolidated is_tensor_collection is_leaf_nontensor
    TensorCollection default_is_leaf
    is_non_tensor is_tensorclass set_get_defaults_to_none get_defaults_to_none assert_allclose_td assert_close
    capture_non_tensor_stack dense_stack_tds from_module from_modules from_namedtuple from_pytree fromkeys
    get_printoptions set_printoptions is_batchedtensor lazy_legacy list_to_stack make_tensordict merge_tensordicts pad
    pad_sequence parse_tensor_dict_string tensorclass unravel_key unravel_key_list set_capture_non_tensor_stack
    set_lazy_legacy set_list_to_stack stack cat lazy_stack maybe_dense_stack from_any from_dict from_dataclass
    from_tuple from_struct_array from_pandas from_parquet from_csv from_json open copy from_schema backends
    append_memmap from_safetensors to_arrow to_safetensors from_arrow
    KEY_SEPARATOR collate group_by is_bool is_floating is_inexact is_integer unpad_sequence unravel_key_to_tuple
    PackLayout
"""


def names() -> list[str]:
    """Every name of a method or property, in order."""
    return [name for line in NAMES.strip().splitlines() for name in line.rpartition(":")[2].split()]


def functions() -> list[str]:
    """Every name of the module."""
    return FUNCTIONS.split()
