"""Arguments that are no scores: an error of ours that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tdstore.errors import InvalidTypeError
from tdstore.rl.scores import accuracies, default_reward, score_from_checks

CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "strict": (lambda bad: score_from_checks(bad, [True]), "score_from_checks\\(\\) takes must be a sequence of bools"),
    "loose": (lambda bad: score_from_checks([True], bad), "score_from_checks\\(\\) takes must be a sequence of bools"),
    "accuracies": (accuracies, "what accuracies\\(\\) takes must be a score or a sequence of scores"),
    "scores": (lambda bad: accuracies([bad]), "what accuracies\\(\\) takes must be a score"),
    "reward": (default_reward, "what default_reward\\(\\) takes must be a score"),
}


@pytest.mark.parametrize("bad", [None, 3, object()], ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_argument(name: str, bad: Any) -> None:
    call, text = CALLS[name]
    with pytest.raises(InvalidTypeError, match=text):
        call(bad)
