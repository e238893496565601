"""Check answers against instructions, with the checkers of the caller, strictly and loosely."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import tdstore
from tdstore.errors import InvalidArgumentError, KeyNotFoundError
from tdstore.rl.scores.ifeval import IFEvalScoreData
from tdstore.rl.scores.scoring import score_from_checks

Checker = Callable[..., bool]
"""Returns whether an answer follows an instruction: `checker(response, **kwargs)`."""


@overload
def verify(rows: Mapping[str, Any], response: str, checkers: Mapping[str, Checker]) -> IFEvalScoreData: ...
@overload
def verify(
    rows: Iterable[Mapping[str, Any]], response: Sequence[str], checkers: Mapping[str, Checker]
) -> IFEvalScoreData: ...
def verify(rows: Any, response: str | Sequence[str], checkers: Mapping[str, Checker]) -> IFEvalScoreData:
    """Check a response against the instructions of a row, or several responses against a row each.

    Strict: the instruction holds for the exact response, and the response is not blank. Loose: it holds for at least
    one of `loose_variants(response)`.

    Args:
        rows: a mapping or TensorDict with `instruction_id_list`, a list of identifiers, and `kwargs`, a list with
            a mapping (or None) for each identifier; arguments that are None are not passed on. Or several of them.
        response: the text; for several rows, one text for each.
        checkers: for each identifier, a function `checker(response, **kwargs) -> bool`.

    Returns:
        The score, of batch size `[]`; for several rows a lazy stack of batch size `[n]`.

    Raises:
        ValueError: the identifiers are not a list, there are fewer kwargs than identifiers, or the numbers of rows and
            responses differ.
        KeyError: an identifier has no checker, or a row has no `instruction_id_list`.

    Example:
        >>> row = {"instruction_id_list": ["no_comma"], "kwargs": [{}]}
        >>> score = verify(row, "Sure, here it is:\\nno commas here", {"no_comma": lambda text: "," not in text})
        >>> score.prompt_level_strict_acc.item(), score.prompt_level_loose_acc.item()
        (False, True)
    """
    if isinstance(response, str):
        return _verify_one(rows, response, checkers)
    each = list(rows)
    if len(each) != len(response):
        raise InvalidArgumentError(
            f"{len(each)} rows and {len(response)} responses: verify takes one response for each row"
        )
    scores = [_verify_one(row, text, checkers) for row, text in zip(each, response, strict=True)]
    if not scores:
        raise InvalidArgumentError("verify takes at least one row, and there is none")
    stack: IFEvalScoreData = tdstore.lazy_stack(scores)
    return stack


def _verify_one(row: Any, response: str, checkers: Mapping[str, Checker]) -> IFEvalScoreData:
    calls = _calls(row, checkers)
    variants = loose_variants(response)
    strict = [bool(response.strip()) and bool(checker(response, **kwargs)) for checker, kwargs in calls]
    loose = [any(bool(checker(text, **kwargs)) for text in variants) for checker, kwargs in calls]
    return score_from_checks(strict, loose)


def _calls(row: Any, checkers: Mapping[str, Checker]) -> list[tuple[Checker, dict[str, Any]]]:
    """Return the checker and the arguments of each instruction of a row."""
    ids, arguments = _plain(row["instruction_id_list"]), _plain(row.get("kwargs"))
    if not isinstance(ids, list):
        raise InvalidArgumentError(f"'instruction_id_list' is a list of identifiers, not a {type(ids).__name__}")
    arguments = [None] * len(ids) if arguments is None else list(arguments)
    if len(arguments) < len(ids):
        raise InvalidArgumentError(
            f"'kwargs' has {len(arguments)} entries for {len(ids)} instructions: each needs one, None or {{}}"
        )
    calls = []
    for name, kwargs in zip(ids, arguments, strict=False):
        if name not in checkers:
            known = ", ".join(sorted(map(str, checkers))) or "none"
            raise KeyNotFoundError(f"no checker for the instruction {name!r}; there are checkers for: {known}")
        calls.append((checkers[name], {key: value for key, value in (kwargs or {}).items() if value is not None}))
    return calls


def _plain(value: Any) -> Any:
    """Convert a value of a TensorDict to plain lists and mappings; return other values unchanged."""
    return value.tolist() if tdstore.is_non_tensor(value) else value


def loose_variants(response: str) -> list[str]:
    """Return the variants of an answer for the loose check, which at least one of them must pass.

    They are the text, and the text without its first line, its last line, and both; then each without asterisks.
    The shortened ones are stripped. Blank variants are left out, so there are at most eight.

    Example:
        >>> loose_variants("Sure:\\n*yes*")
        ['Sure:\\n*yes*', '*yes*', 'Sure:', 'Sure:\\nyes', 'yes', 'Sure:']
    """
    lines = response.split("\n")
    shortened = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    variants = [response, *shortened]
    return [text for text in [*variants, *(text.replace("*", "") for text in variants)] if text.strip()]
