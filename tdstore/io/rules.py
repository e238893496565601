"""Rules: options for the leaves whose keys match a pattern."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from tdstore.errors import KeyNotFoundError, OptionError
from tdstore.keys import join, unravel
from tdstore.types import LeafSpec, NestedKey, Path

Rules = Mapping[NestedKey, Mapping[str, Any]]
_FACTS = ("shape", "dtype", "fill_value")


def apply_rules(specs: Mapping[Path, LeafSpec], rules: Rules) -> dict[Path, LeafSpec]:
    """Set the options of the rules that match each leaf. If several rules set an option, the last one is used.

    A tuple is matched part by part, a string against the whole path written with dots; `*`, `?` and `[...]`
    are wildcards. A pattern that matches a nested TensorDict matches every leaf in it.

    Raises:
        KeyNotFoundError: a rule matches no leaf; the hint names the most similar key.
        OptionError: a rule is not a dict of options, or would change the shape, dtype or fill value of a leaf.

    Example:
        >>> specs = {("next", "obs"): LeafSpec((8,), "uint8"), ("done",): LeafSpec((8,), "bool")}
        >>> apply_rules(specs, {"*": {"chunks": 4}, ("next", "*"): {"chunks": 8}})
        {('next', 'obs'): LeafSpec((8,), 'uint8', chunks=8), ('done',): LeafSpec((8,), 'bool', chunks=4)}
    """
    options: dict[Path, dict[str, Any]] = {path: {} for path in specs}
    for pattern, chosen in rules.items():
        _check(pattern, chosen)
        found = [path for path in specs if matches(pattern, path)]
        if not found:
            raise KeyNotFoundError(f"the rule {pattern!r} matches no tensor", hint=near_key(pattern, specs))
        for path in found:
            options[path] |= chosen
    return {path: spec.replace(**options[path]) for path, spec in specs.items()}


def matches(pattern: NestedKey, path: Path) -> bool:
    """Check whether a pattern matches a leaf, or a TensorDict above it."""
    above = (path[:depth] for depth in range(1, len(path) + 1))
    if isinstance(pattern, str):
        return any(fnmatchcase(join(place, "."), pattern) for place in above)
    parts = unravel(pattern)
    return len(parts) <= len(path) and all(map(fnmatchcase, path, parts))


def near_key(key: NestedKey, known: Iterable[Path]) -> str | None:
    """Return a hint with the most similar known key, of a leaf or of a TensorDict above it; None without one."""
    places = {path[:depth] for path in known for depth in range(1, len(path) + 1)}
    by_text = {join(place, "."): place for place in sorted(places)}
    near = difflib.get_close_matches(join(unravel(key), "."), by_text, 1, 0.4)
    if not near:
        return None
    place = by_text[near[0]]
    return f"did you mean {place if len(place) > 1 else place[0]!r}?"


def _check(pattern: NestedKey, chosen: object) -> None:
    if not isinstance(chosen, Mapping) or not all(isinstance(name, str) for name in chosen):
        raise OptionError(
            f"the rule {pattern!r} must be a dict of options, not {chosen!r}",
            hint='rules={"obs": {"chunks": 64}}',
        )
    for name in _FACTS:
        if name in chosen:
            raise OptionError(
                f"the rule {pattern!r} cannot change the {name} of a leaf: a copy holds what its source holds"
            )
