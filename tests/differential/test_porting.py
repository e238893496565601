"""What code written for the peer does with small methods: pieces, sizes, keys, gradients."""

from __future__ import annotations

import torch

from .cases import Case, Cases
from .oracle import Side
from .structures import t

case = Cases()


# --- pieces of nested tensors ---
def jagged(M: Side, n: int = 3) -> object:
    rows = [torch.arange(3.0) + i for i in range(n)]
    rows[-1] = rows[-1][:1]
    return M.td({"x": torch.nested.nested_tensor(rows, layout=torch.jagged), "y": t(n, 2)}, [n])


def rows_of(pieces: object) -> list[object]:
    return [([row.tolist() for row in piece["x"].unbind()], piece["y"], piece.batch_size) for piece in pieces]


for n in (1, 2, 3, 5):
    case(f"chunk({n}) of a jagged leaf", lambda M, n=n: rows_of(jagged(M).chunk(n)))
case("chunk(2) of a jagged leaf, 5 rows", lambda M: rows_of(jagged(M, 5).chunk(2)))
case("chunk of a nested jagged leaf", lambda M: [p["n", "y"] for p in M.td({"n": jagged(M)}, [3]).chunk(2)])

# --- levels that have leaves ---
DEEP = {
    "nothing": {},
    "an empty one": {"a": {}},
    "empty ones": {"a": {"b": {}}},
    "two levels": {"a": {"b": {"c": torch.ones(())}}},
    "an empty one beside": {"a": {"b": {}}, "c": {"d": torch.ones(())}},
    "an empty one below": {"a": {"b": {"c": {}}, "d": torch.ones(())}},
    "a text": {"a": {"b": "text"}},
    "a tensor": {"a": torch.ones(())},
}
for name, entries in DEEP.items():
    case(f"depth of {name}", lambda M, e=entries: M.td(e).depth)
    case(f"depth of {name} in a lazy stack", lambda M, e=entries: M.lazy_stack([M.td(e), M.td(e)]).depth)
    case(
        f"depth of {name} in a lazy entry",
        lambda M, e=entries: M.td({"l": M.lazy_stack([M.td(e), M.td(e)])}, [2]).depth,
    )


# --- expand_as: leaf by leaf ---
def wide(M: Side) -> object:
    return M.td({"a": t(2, 3, 5, 4), "n": {"b": t(2, 3, 5)}, "s": "wide"}, [2, 3])


def narrow(M: Side, **more: object) -> object:
    return M.td({"a": t(3, 1, 4), "n": {"b": t(3, 1)}, **more}, [3])


case("expand_as", lambda M: narrow(M).expand_as(wide(M)))
case(
    "expand_as, sharing", lambda M: (lambda td: td.expand_as(wide(M))["a"].data_ptr() == td["a"].data_ptr())(narrow(M))
)
case("expand_as with a text", lambda M: narrow(M, s="narrow").expand_as(wide(M)))
case("expand_as of a part of the keys", lambda M: narrow(M).select("a").expand_as(wide(M)))
case("expand_as without the keys", lambda M: narrow(M).expand_as(wide(M).select("n")))
case("expand_as without the nested keys", lambda M: narrow(M).expand_as(wide(M).select("a")))
case("expand_as a tensor", lambda M: narrow(M).expand_as(torch.zeros(2, 3)))
case(
    "expand_as to a batch of fewer dimensions",
    lambda M: narrow(M).select("a").expand_as(M.td({"a": t(1, 3, 5, 4)}, [1])),
)
case(
    "expand_as of leaves that do not fit",
    lambda M: narrow(M).expand_as(M.td({"a": t(2, 3, 5, 3), "n": {"b": t(2, 3, 5)}}, [2, 3])),
)
case("expand_as of a batch of one", lambda M: M.td({"a": t(1, 4)}, [1]).expand_as(M.td({"a": t(6, 4)}, [6])))
case("expand_as of a lazy stack", lambda M: M.lazy_stack([narrow(M)[0], narrow(M)[1], narrow(M)[2]]).expand_as(wide(M)))
case("expand_as a lazy stack", lambda M: narrow(M).expand_as(M.lazy_stack([wide(M)[0], wide(M)[1]])))
case(
    "expand_as of lazy stacks",
    lambda M: M.lazy_stack([narrow(M)] * 2).expand_as(M.lazy_stack([wide(M)[0], wide(M)[1]])),
)


def tensorclass_of(M: Side) -> type:
    return M.tensorclass(type("Pair", (), {"__annotations__": {"a": torch.Tensor, "s": str}, "s": "text"}))


def pair(M: Side, *shape: int, batch: tuple[int, ...]) -> object:
    return tensorclass_of(M)(a=t(*shape), batch_size=batch)


case(
    "expand_as of a tensorclass",
    lambda M: pair(M, 3, 1, batch=(3,)).expand_as(pair(M, 2, 3, 5, batch=(2, 3))).to_dict(),
)
case("expand_as a tensorclass", lambda M: M.td({"a": t(3, 1)}, [3]).expand_as(pair(M, 2, 3, 5, batch=(2, 3))))

# --- gather in place and into ---
INDEX = torch.zeros(1, 3, dtype=torch.int64)
case(
    "gather with out and inplace",
    lambda M: M.td({"a": t(2, 3)}, [2, 3]).gather(0, INDEX, out=M.td({"a": t(1, 3)}, [1, 3]), inplace=True),
)
case(
    "gather of a lazy stack with out and inplace",
    lambda M: M.lazy_stack([M.td({"a": t(3)}, [3])] * 2).gather(
        0, INDEX, out=M.td({"a": t(1, 3)}, [1, 3]), inplace=True
    ),
)
case("gather with out", lambda M: M.td({"a": t(2, 3)}, [2, 3]).gather(0, INDEX, out=M.td({"a": t(1, 3)}, [1, 3])))


# --- separates ---
def apart(M: Side, *keys: object, **options: object) -> object:
    td = M.td({"a": t(2), "b": t(2), "n": {"c": t(2)}}, [2])
    taken = td.separates(*keys, **options)
    return sorted(map(str, taken.keys(True))), [taken[key] for key in keys], td


case("separates without an entry, default None", lambda M: apart(M, "a", "no", default=None))
case("separates without an entry, not strict", lambda M: apart(M, "a", "no", strict=False))
case("separates without a nested entry, default None", lambda M: apart(M, "a", ("n", "no"), default=None))
case("separates without an entry, strict", lambda M: apart(M, "a", "no"))
case("separates with all entries, default None", lambda M: apart(M, "a", ("n", "c"), default=None))


# --- elements of a lazy stack ---
def among(M: Side, pick: object, dim: int = 0) -> object:
    elements = [M.td({"a": t(2), "n": {"b": t(2)}}, [2]) for _ in range(3)]
    return pick(elements, M.lazy_stack(elements, dim))


case("an element is in a lazy stack", lambda M: among(M, lambda e, s: [x in s for x in e]))
case("an element is in a stack along 1", lambda M: among(M, lambda e, s: [x in s for x in e], 1))
case("an equal TensorDict is not", lambda M: among(M, lambda e, s: e[0].clone() in s))
case("what iteration gives is", lambda M: among(M, lambda e, s: [x in s for x in s]))
case("keys are, too", lambda M: among(M, lambda e, s: ["a" in s, ("n", "b") in s, "no" in s, ("n", "no") in s]))


# --- gradients ---
def differentiated(M: Side, *, lock: bool) -> object:
    td = M.td({"a": torch.ones(3, requires_grad=True), "n": {"b": torch.ones(3, requires_grad=True)}}, [3])
    (td["a"] * td["n", "b"]).sum().backward()
    td = td.lock_() if lock else td
    return td.grad, td.grad.is_locked, td.data.is_locked


case("grad of a locked TensorDict", lambda M: differentiated(M, lock=True))
case("grad of an unlocked TensorDict", lambda M: differentiated(M, lock=False))


def backward(M: Side, gradient: object) -> object:
    td = M.td({"a": torch.ones(3, requires_grad=True)}, [3])
    (td * 2).backward(gradient(M) if callable(gradient) else gradient)
    return td.grad


case("backward of a tensor", lambda M: backward(M, torch.ones(3)))
case("backward of a number", lambda M: backward(M, 1.0))
case("backward of a TensorDict", lambda M: backward(M, lambda M: M.td({"a": t(3).float()}, [3])))

# --- lists ---
NODES = {"a": t(2, 3), "n": {"b": t(2, 2, 2), "s": "text"}}
for nodes in (True, False):
    for tensors in (True, False):
        case(
            f"tolist(convert_nodes={nodes}, convert_tensors={tensors})",
            lambda M, n=nodes, c=tensors: M.td(NODES, [2]).tolist(convert_nodes=n, convert_tensors=c),
        )
        case(
            f"tolist(convert_nodes={nodes}, convert_tensors={tensors}) of a nested batch",
            lambda M, n=nodes, c=tensors: M.td({"n": M.td({"b": t(2, 3, 4)}, [2, 3]), "c": t(2)}, [2]).tolist(
                convert_nodes=n, convert_tensors=c
            ),
        )
        case(
            f"tolist(convert_nodes={nodes}, convert_tensors={tensors}) of two dimensions",
            lambda M, n=nodes, c=tensors: M.td({"n": {"b": t(2, 3, 4)}, "c": t(2, 3)}, [2, 3]).tolist(
                convert_nodes=n, convert_tensors=c
            ),
        )


@case.parametrize
def test_small_methods(case: Case) -> None:
    case.check()
