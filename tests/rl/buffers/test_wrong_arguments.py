"""Arguments that no replay buffer can take: an error of ours that names the argument, and the rows as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import (
    InvalidArgumentError,
    InvalidKeyError,
    InvalidTypeError,
    StateDictError,
    StoreExistsError,
    TDStoreError,
    UnknownBackendError,
)
from tdstore.rl import (
    LazyMemmapStorage,
    LazyStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def rows() -> TensorDict:
    return TensorDict({"obs": torch.arange(8.0).view(4, 2), "td_error": torch.ones(4)}, [4])


@pytest.fixture(params=["memory", "prioritized", "h5"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made: ReplayBuffer
    if request.param == "h5":
        made = TensorDictReplayBuffer(storage=LazyStorage(10, storage="h5", path=tmp_path / "rows.h5"), batch_size=2)
    elif request.param == "memory":
        made = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    else:
        made = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=LazyTensorStorage(10), batch_size=2)
    made.extend(rows())
    yield made
    made.close()


def forget(buffer: Any) -> None:
    """Forget the rows, with a flag that is none."""
    try:
        buffer.empty(torch.zeros(2))
    except RuntimeError as error:
        raise InvalidArgumentError(str(error)) from None


CALLS: dict[str, tuple[Callable[[Any], Any], type[TDStoreError], str]] = {
    "an unclear flag": (forget, InvalidArgumentError, "ambiguous"),
    "too many rows": (lambda b: b.sample(10**30), InvalidArgumentError, "batch_size is a number of rows, at least 1"),
    "checkpoint to None": (lambda b: b.dumps(None), InvalidTypeError, "path must be a path, not None"),
    "checkpoint of None": (lambda b: b.loads(None), InvalidTypeError, "path must be a path, not None"),
    "a key": (lambda b: b.set_(None, 1), InvalidKeyError, "a key is a string"),
    "update by a number": (lambda b: b.update_(3), InvalidTypeError, "a TensorDict or a dict, not an int"),
    "update by pairs": (lambda b: b.update_("xy"), InvalidTypeError, "a TensorDict or a dict, not a str"),
    "keys": (lambda b: b.update_(rows(), keys_to_update=3), InvalidTypeError, "a sequence of keys, not an int"),
    "no rows": (lambda b: b.write_all(None), InvalidTypeError, "must be rows, not None"),
    "the end of rows": (lambda b: b.write_all(rows(), end="x"), InvalidTypeError, "end must be an int"),
    "the place of a transform": (lambda b: b.insert_transform("x", len), InvalidTypeError, "index must be an int"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_argument_and_nothing_changes(buffer: Any, name: str) -> None:
    call, kind, text = CALLS[name]
    with pytest.raises(kind, match=text):
        call(buffer)
    assert (buffer[:].select("obs", "td_error") == rows()).all()


def test_a_checkpoint_where_a_file_is(buffer: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreExistsError, match="is no folder"):
            buffer.dumps(place)
    assert (tmp_path / "file").read_text() == "mine"


def test_settings_are_checked_when_the_buffer_is_made() -> None:
    with pytest.raises(InvalidTypeError, match="collate_fn must be a function, not a str"):
        ReplayBuffer(storage=LazyTensorStorage(10), collate_fn="stack")  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="dim_extend must be an int"):
        ReplayBuffer(storage=LazyTensorStorage(10), dim_extend="x")  # type: ignore[arg-type]
    for prefetch in (-1, 10**30):
        with pytest.raises(InvalidArgumentError, match=f"prefetch={prefetch}: the number of batches to read ahead"):
            ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, prefetch=prefetch)
    with pytest.raises(InvalidTypeError, match="prefetch must be an int, not a str"):
        ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, prefetch="2")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"max_size is a number of slots, at least 1 and below 2\*\*62"):
        LazyTensorStorage(10**30)
    with pytest.raises(InvalidTypeError, match="path must be a path, not an int"):
        LazyStorage(10, storage="h5", path=3)  # type: ignore[arg-type]
    with pytest.raises(UnknownBackendError, match="no backend is named '3'"):
        LazyStorage(10, storage=3)


@pytest.mark.parametrize("lacking", ["_weights", "_alpha", "_eps", "_largest"])
def test_a_state_that_lacks_something_changes_nothing(lacking: str) -> None:
    sampler, other = PrioritizedSampler(4, 0.5, 0.6), PrioritizedSampler(4, 0.7, 0.8)
    before = sampler.state_dict()
    state = other.state_dict()
    del state[lacking]
    with pytest.raises(StateDictError, match=lacking):
        sampler.load_state_dict(state)
    after = sampler.state_dict()
    assert torch.equal(before.pop("_weights"), after.pop("_weights"))
    assert before == after


@pytest.mark.parametrize("value", ["x", {}, object(), 2**70, b"x"], ids=["str", "dict", "object", "int", "bytes"])
@pytest.mark.parametrize("name", ["trajectories", "ends"])
def test_marks_of_slices_are_tensors(name, value):
    with pytest.raises(InvalidTypeError, match=f"^{name} must be"):
        SliceSampler(slice_len=2, **{name: value})


@pytest.mark.parametrize("dtype", [None, "float32", torch.int64])
def test_weights_of_priorities_are_floats(dtype):
    with pytest.raises(InvalidTypeError, match="^dtype is one of floats"):
        PrioritizedSampler(4, alpha=1.0, beta=1.0, dtype=dtype)


def prioritized(**arguments: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(10, 0.7, 0.5, slice_len=2, **arguments)


FLAGS: dict[str, Callable[..., Sampler]] = {
    "strict_length": lambda **flags: SliceSampler(slice_len=2, **flags),
    "pad_output": lambda **flags: SliceSampler(slice_len=2, strict_length=False, **flags),
    "fragmented": lambda **flags: SliceSampler(slice_len=2, **flags),
    "drop_last": lambda **flags: SliceSamplerWithoutReplacement(slice_len=2, **flags),
    "shuffle": SamplerWithoutReplacement,
    "max_priority_within_buffer": prioritized,
}


@pytest.mark.parametrize("value", ["no", None, 1, torch.ones(2)])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_samplers_are_true_or_false(name: str, value: object) -> None:
    with pytest.raises(InvalidTypeError, match=f"^{name} must be True or False"):
        FLAGS[name](**{name: value})


def test_flags_of_buffers_are_true_or_false() -> None:
    with pytest.raises(InvalidTypeError, match="^pin_memory must be True or False"):
        ReplayBuffer(pin_memory="cuda")  # type: ignore[arg-type]


STORAGE_FLAGS: dict[str, Callable[..., object]] = {
    "existsok": lambda **flags: LazyMemmapStorage(4, **flags),
    "shared_init": lambda **flags: LazyStorage(4, **flags),
    "auto_cleanup": lambda **flags: LazyMemmapStorage(4, **flags),
    "compilable": lambda **flags: ListStorage(4, **flags),
    "consolidated": lambda **flags: LazyTensorStorage(4, **flags),
    "cleanup_memmap": lambda **flags: LazyTensorStorage(4, **flags),
    "shared": ReplayBuffer,
    "delayed_init": ReplayBuffer,
    "sample_from_all": lambda **flags: SamplerEnsemble(RandomSampler(), **flags),
    "use_gpu": lambda **flags: SliceSampler(slice_len=2, **flags),
}


@pytest.mark.parametrize("value", ["no", 1, torch.ones(2)])
@pytest.mark.parametrize("name", STORAGE_FLAGS)
def test_flags_of_storages_and_buffers_are_true_or_false(name: str, value: object) -> None:
    with pytest.raises(InvalidTypeError, match=f"^{name} must be True or False"):
        STORAGE_FLAGS[name](**{name: value})


@pytest.mark.parametrize("make", [LazyStorage, LazyMemmapStorage, LazyTensorStorage])
def test_flags_of_lazy_storages_are_true_or_false(make: Callable[..., object]) -> None:
    for name in ("shared_init", "compilable"):
        with pytest.raises(InvalidTypeError, match=f"^{name} must be True or False"):
            make(4, **{name: "no"})
    with pytest.raises(InvalidArgumentError, match="ndim"):
        make(4, ndim=True)


@pytest.mark.parametrize(("value", "error"), [("long", InvalidTypeError), (-1.0, InvalidArgumentError)])
def test_the_time_that_a_reader_waits_is_a_number_of_seconds(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="init_timeout"):
        LazyStorage(4, init_timeout=value)


@pytest.mark.parametrize("name", ["traj_key", "end_key", "init_key", "truncated_key"])
@pytest.mark.parametrize("value", [5, b"episode", ("next", 5), True])
@pytest.mark.parametrize(
    "make", [lambda **k: SliceSampler(slice_len=2, **k), lambda **k: SliceSamplerWithoutReplacement(slice_len=2, **k),
             prioritized],
)  # fmt: skip
def test_keys_of_slices_are_keys(make: Callable[..., Sampler], name: str, value: object) -> None:
    with pytest.raises(InvalidKeyError, match=f"^{name}: a key is a string"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ("done", InvalidTypeError, "end_keys must be a list of keys, not a str"),
        (5, InvalidTypeError, "end_keys must be a list of keys, not an int"),
        ([5], InvalidKeyError, "end_keys: a key is a string"),
        ([], InvalidArgumentError, "end_keys is an empty list"),
    ],
)
def test_several_keys_of_slices(value: Any, error: type[TDStoreError], match: str) -> None:
    with pytest.raises(error, match=match):
        SliceSampler(slice_len=2, end_keys=value)


@pytest.mark.parametrize("keys", [{"traj_key": "epsode"}, {"end_key": ("next", "dne")}, {"end_keys": ["dne"]}])
def test_a_misspelled_key_names_those_that_the_rows_have(keys: Any) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2, **keys), batch_size=2
    )
    buffer.extend(TensorDict({"episode": torch.zeros(4), "next": {"done": torch.ones(4, 1)}}, [4]))
    with pytest.raises(KeyError, match=r"(?s)no entry .*they have 'episode', \('next', 'done'\)"):
        buffer.sample()
