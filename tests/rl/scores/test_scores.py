"""Scores of instruction-following answers: the container, the reward, and checking with the caller's checkers."""

from __future__ import annotations

import pickle

import pytest
import torch

import tdstore
from tdstore import TensorClass, TensorDict
from tdstore.rl.scores import (
    IFEvalScoreData,
    accuracies,
    default_reward,
    loose_variants,
    score_from_checks,
    verify,
)

FIELDS = ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")
T, F = True, False


class Optional(TensorClass):
    x: torch.Tensor | None = None
    y: torch.Tensor | None = None


def shapes(score):
    return [tuple(score.get(name).shape) for name in FIELDS]


# -- I1, I6: the container -----------------------------------------------------------------
def test_i1_values_get_a_trailing_dimension():
    score = IFEvalScoreData(T, [T, F, T], T, [T, T, T])
    assert shapes(score) == [(1,), (3,), (1,), (3,)]
    assert all(score.get(name).dtype == torch.bool for name in FIELDS)
    assert score.inst_level_strict_acc.tolist() == [T, F, T]


def test_i1_none_becomes_zeros():
    score = IFEvalScoreData(None, None, None, None, batch_size=[2])
    assert shapes(score) == [(2, 1)] * 4
    assert all(score.get(name).dtype == torch.float32 and not score.get(name).any() for name in FIELDS)


def test_i6_a_missing_field_is_named():
    with pytest.raises(TypeError, match="inst_level_loose_acc"):
        IFEvalScoreData(T, [T], T)


@pytest.mark.parametrize("wrong", ["yes", ["a"], {"a": 1}, object()], ids=["str", "list", "dict", "object"])
def test_a_field_that_is_no_score_is_named(wrong):
    with pytest.raises(TypeError, match="inst_level_strict_acc is a tensor, a bool"):
        IFEvalScoreData(T, wrong, T, [T])


def test_a_batch_of_one_value_each():
    score = IFEvalScoreData(torch.tensor([T, F]), torch.ones(2, 3, dtype=torch.bool), None, None, batch_size=[2])
    assert shapes(score) == [(2, 1), (2, 3), (2, 1), (2, 1)]
    assert score[1].prompt_level_strict_acc.tolist() == [F]


def test_ragged_lists_are_padded_with_false():
    stack = tdstore.lazy_stack([IFEvalScoreData(T, [T, T], T, [T, T]), IFEvalScoreData(T, [T], T, [T])])
    padded = stack.get("inst_level_strict_acc", as_padded_tensor=True)
    assert padded.tolist() == [[T, T], [T, F]]
    assert type(stack) is IFEvalScoreData


def test_the_default_spec_makes_instances():
    spec = IFEvalScoreData.default_spec((2,))
    assert dict(spec) == dict.fromkeys(FIELDS, ((2, 1), torch.bool))
    assert spec.data_cls is IFEvalScoreData
    zero = spec.zero()
    assert type(zero) is IFEvalScoreData
    assert zero.batch_size == (2,)
    assert shapes(zero) == [(2, 1)] * 4
    assert not any(zero.get(name).any() for name in FIELDS)
    made = IFEvalScoreData.from_schema(IFEvalScoreData.default_spec(()), batch_size=[5])
    assert shapes(made) == [(5, 1)] * 4
    assert made.inst_level_loose_acc.dtype == torch.bool


# -- I2, I3: the reward --------------------------------------------------------------------
REWARDS = [
    ((T, [T, T], T, [T, T]), ["t"], ["a"], 1.15),
    ((F, [F, F], F, [F, F]), None, None, 0.0),
    ((T, [T, T], T, [T, T]), None, ["a"], 1.10),
    ((T, [T, T], T, [T, T]), ["t", "t"], ["a", "a"], 1.0),
    ((F, [T, F, T], T, [T, T, T]), None, ["a"], 0.60),
    ((F, [T, F], F, [T, F]), ["t"], None, 0.25),
]


@pytest.mark.parametrize(("fields", "think", "answer", "expected"), REWARDS)
def test_i2_reward(fields, think, answer, expected):
    reward = default_reward(IFEvalScoreData(*fields), think, answer)
    assert reward.shape == (1, 1)
    assert reward.dtype == torch.get_default_dtype()
    assert reward.item() == pytest.approx(expected)


BATCH = [(T, [T, F], T, [T, T]), (F, [F, F], F, [T, F])]


@pytest.mark.parametrize("stack", [torch.stack, tdstore.lazy_stack])
def test_i3_reward_of_a_batch(stack):
    scores = stack([IFEvalScoreData(*row) for row in BATCH])
    reward = default_reward(scores)
    assert reward.shape == (2, 1, 1)
    assert reward.flatten().tolist() == pytest.approx([0.85, 0.05])


def test_reward_of_a_ragged_stack_averages_real_entries_only():
    rows = [(T, [T, T, T], T, [T, T, T]), (F, [T], F, [F])]
    scores = tdstore.lazy_stack([IFEvalScoreData(*row) for row in rows])
    assert default_reward(scores).flatten().tolist() == pytest.approx([1.0, 0.3])


def test_blocks_of_each_answer():
    scores = torch.stack([IFEvalScoreData(*row) for row in BATCH])
    for blocks in ([["a"], ["a", "b"]], torch.tensor([1, 2])):
        assert default_reward(scores, answer_blocks=blocks).flatten().tolist() == pytest.approx([0.95, 0.05])
    with pytest.raises(ValueError, match="answer_blocks has lists for 3 answers"):
        default_reward(scores, answer_blocks=[["a"], [], []])


def test_reward_wants_four_weights():
    with pytest.raises(ValueError, match="4 weights"):
        default_reward(score_from_checks([T], [T]), weights=(1.0,))


def test_fields_that_are_none_count_nothing():
    score = IFEvalScoreData.from_tensordict(TensorDict({"prompt_level_strict_acc": torch.tensor([T])}))
    assert default_reward(score).item() == pytest.approx(0.4)
    bare = score.select("prompt_level_strict_acc")
    assert default_reward(bare).item() == pytest.approx(0.4)


# -- from checks ---------------------------------------------------------------------------
def test_score_from_checks():
    score = score_from_checks([T, F], [T, T])
    assert score.prompt_level_strict_acc.tolist() == [F]
    assert score.prompt_level_loose_acc.tolist() == [T]
    assert score.inst_level_strict_acc.tolist() == [T, F]
    assert shapes(score_from_checks([T, F, T], [T, T, T], batch_size=(2,))) == [(2, 1), (2, 3), (2, 1), (2, 3)]
    with pytest.raises(ValueError, match="2 strict checks and 1 loose"):
        score_from_checks([T, F], [T])


def test_no_instruction_is_followed():
    score = score_from_checks([], [])
    assert score.prompt_level_strict_acc.tolist() == [T]
    assert shapes(score) == [(1,), (0,), (1,), (0,)]
    assert default_reward(score).item() == pytest.approx(1.0)
    assert accuracies([score])["inst_level_strict_acc"] == 1.0


@pytest.mark.parametrize("join", [list, tdstore.lazy_stack])
def test_accuracies_pool_instructions(join):
    scores = join([score_from_checks([T, F], [T, T]), score_from_checks([T], [T])])
    found = accuracies(scores)
    assert found["inst_level_strict_acc"] == pytest.approx(2 / 3)
    assert found["prompt_level_strict_acc"] == 0.5
    assert found["prompt_level_loose_acc"] == found["inst_level_loose_acc"] == 1.0
    with pytest.raises(ValueError, match="at least one score"):
        accuracies([])


# -- I4: verify ----------------------------------------------------------------------------
CHECKERS = {
    "no_comma": lambda text: "," not in text,
    "quotation": lambda text: len(text) > 1 and text[0] == text[-1] == '"',
    "at_most": lambda text, words=99: len(text.split()) <= words,
}


def checked(name, text, kwargs=None):
    score = verify({"instruction_id_list": [name], "kwargs": [kwargs]}, text, CHECKERS)
    return score.inst_level_strict_acc.item(), score.inst_level_loose_acc.item()


def test_i4_strict_and_loose():
    assert checked("no_comma", "Sure, here it is:\nno commas here") == (F, T)
    assert checked("quotation", '*"hi"*') == (F, T)
    assert checked("no_comma", "") == (F, F)
    assert checked("no_comma", " \n ") == (F, F)


def test_variants():
    assert loose_variants("one\ntwo\n*three*") == [
        "one\ntwo\n*three*", "two\n*three*", "one\ntwo", "two",
        "one\ntwo\nthree", "two\nthree", "one\ntwo", "two",
    ]  # fmt: skip
    assert loose_variants("  ") == []
    assert loose_variants("***") == ["***"]


def test_only_none_is_dropped_of_arguments():
    assert checked("at_most", "one", {"words": 0}) == (F, F)
    assert checked("at_most", "one", {"words": None}) == (T, T)


def test_bad_rows_are_refused():
    for row, error, text in (
        ({"instruction_id_list": "no_comma", "kwargs": [{}]}, ValueError, "not a str"),
        ({"instruction_id_list": ["zz"], "kwargs": [{}]}, KeyError, "zz"),
        ({"instruction_id_list": ["no_comma", "quotation"], "kwargs": [{}]}, ValueError, "1 entries for 2"),
    ):
        with pytest.raises(error, match=text):
            verify(row, "text", CHECKERS)
    with pytest.raises(ValueError, match="1 rows and 2 responses"):
        verify([{"instruction_id_list": [], "kwargs": []}], ["a", "b"], CHECKERS)


def test_many_rows_give_a_lazy_stack():
    rows = [
        {"instruction_id_list": ["no_comma", "quotation"], "kwargs": [{}, {}]},
        {"instruction_id_list": ["no_comma"], "kwargs": [None]},
    ]
    score = verify(rows, ['"a"', "b"], CHECKERS)
    assert type(score) is IFEvalScoreData
    assert score.batch_size == (2,)
    assert accuracies(score)["inst_level_strict_acc"] == 1.0


def test_a_row_of_a_tensordict():
    row = TensorDict({})
    row.set_non_tensor("instruction_id_list", ["no_comma"])
    row.set_non_tensor("kwargs", [{"zz": None}])
    assert verify(row, "text", CHECKERS).prompt_level_strict_acc.item()


# -- I5: on backends -----------------------------------------------------------------------
def round_trips(tmp_path, obj):
    obj.save(tmp_path / "folder").close()
    yield tdstore.load(tmp_path / "folder")
    for suffix in ("h5", "zarr"):
        obj.save(tmp_path / f"data.{suffix}").close()
        with tdstore.open(tmp_path / f"data.{suffix}") as stored:
            yield stored
    yield obj.memmap(tmp_path / "memmap")
    yield obj.clone().share_memory_()
    yield pickle.loads(pickle.dumps(obj))
    empty = obj.empty() if obj.is_empty() else obj.clone().zero_()
    empty.load_state_dict(obj.state_dict())
    yield empty


def test_i5_scores_come_back_from_every_place(tmp_path):
    score = IFEvalScoreData(T, [T, F, T], F, [T, T, T])
    for found in round_trips(tmp_path, score):
        assert type(found) is IFEvalScoreData
        for name in FIELDS:
            assert found.get(name).dtype == torch.bool
            assert found.get(name).tolist() == score.get(name).tolist()


def test_i5_none_comes_back_as_none_from_every_place(tmp_path):
    for found in round_trips(tmp_path, Optional(y=torch.arange(3))):
        assert type(found) is Optional
        assert found.x is None
        assert found.y.tolist() == [0, 1, 2]
