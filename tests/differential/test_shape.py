"""Shape operations on the batch dimensions, stack and cat, and the torch functions that dispatch to them."""

from __future__ import annotations

import torch

from .cases import Case, Cases
from .structures import SAMPLES, t

case = Cases()


def on(sample, step):
    """The result and whether leaf "a" of it is a view."""

    def program(M):
        td = M.sample(sample)
        out = step(M, td)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        a, whole = (x.get("a") if isinstance(x, M.base) else None for x in (first, td))
        shared = (
            a is not None and whole is not None and a.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        )
        return out, shared, td

    return program


STEPS = {
    "view(-1)": lambda M, td: td.view(-1),
    "view(2, -1)": lambda M, td: td.view(2, -1),
    "view([12])": lambda M, td: td.view([12]),
    "view(torch.Size)": lambda M, td: td.view(torch.Size([3, 4])),
    "view(same)": lambda M, td: td.view(td.batch_size),
    "view(wrong)": lambda M, td: td.view(7),
    "view()": lambda M, td: td.view(()),
    "reshape(-1)": lambda M, td: td.reshape(-1),
    "reshape(2, -1)": lambda M, td: td.reshape(2, -1),
    "reshape([12])": lambda M, td: td.reshape([12]),
    "reshape(same)": lambda M, td: td.reshape(td.batch_size),
    "reshape(wrong)": lambda M, td: td.reshape(7),
    "reshape after transpose": lambda M, td: td.transpose(0, 1).reshape(-1),
    "view after transpose": lambda M, td: td.transpose(0, 1).view(-1),
    "unsqueeze(0)": lambda M, td: td.unsqueeze(0),
    "unsqueeze(1)": lambda M, td: td.unsqueeze(1),
    "unsqueeze(-1)": lambda M, td: td.unsqueeze(-1),
    "unsqueeze(-2)": lambda M, td: td.unsqueeze(-2),
    "unsqueeze(9)": lambda M, td: td.unsqueeze(9),
    "unsqueeze(-9)": lambda M, td: td.unsqueeze(-9),
    "squeeze()": lambda M, td: td.unsqueeze(0).unsqueeze(-1).squeeze(),
    "squeeze(0)": lambda M, td: td.unsqueeze(0).squeeze(0),
    "squeeze(-1)": lambda M, td: td.unsqueeze(-1).squeeze(-1),
    "squeeze of another size": lambda M, td: td.squeeze(0),
    "squeeze of nothing": lambda M, td: td.squeeze(),
    "squeeze(9)": lambda M, td: td.squeeze(9),
    "permute(1, 0)": lambda M, td: td.permute(1, 0),
    "permute([1, 0])": lambda M, td: td.permute([1, 0]),
    "permute(dims=)": lambda M, td: td.permute(dims=(1, 0)),
    "permute(-1, 0)": lambda M, td: td.permute(-1, 0),
    "permute(0, 1)": lambda M, td: td.permute(0, 1),
    "permute(0, 0)": lambda M, td: td.permute(0, 0),
    "permute(0)": lambda M, td: td.permute(0),
    "permute(2, 0, 1)": lambda M, td: td.permute(2, 0, 1),
    "transpose(0, 1)": lambda M, td: td.transpose(0, 1),
    "transpose(-1, 0)": lambda M, td: td.transpose(-1, 0),
    "transpose(0, 0)": lambda M, td: td.transpose(0, 0),
    "transpose(0, 5)": lambda M, td: td.transpose(0, 5),
    "expand(2, *)": lambda M, td: td.expand(2, *td.batch_size),
    "expand([2, *])": lambda M, td: td.expand([2, *td.batch_size]),
    "expand(-1)": lambda M, td: td.expand(2, *[-1] * td.batch_dims),
    "expand(same)": lambda M, td: td.expand(*td.batch_size),
    "expand(wrong)": lambda M, td: td.expand(7, 7),
    "expand of one": lambda M, td: td.unsqueeze(1).expand(td.batch_size[0], 5, *td.batch_size[1:]),
    "expand_as": lambda M, td: td.expand_as(torch.stack([td, td])),
    "flatten()": lambda M, td: td.flatten(),
    "flatten(0, 1)": lambda M, td: td.flatten(0, 1),
    "flatten(0, -1)": lambda M, td: td.flatten(0, -1),
    "flatten(1)": lambda M, td: td.flatten(1),
    "flatten(1, 0)": lambda M, td: td.flatten(1, 0),
    "flatten(0, 9)": lambda M, td: td.flatten(0, 9),
    "unflatten(0, (2, 2))": lambda M, td: td.unflatten(0, (2, 2)),
    "unflatten(0, [2, -1])": lambda M, td: td.unflatten(0, [2, -1]),
    "unflatten(-1, (3, 1))": lambda M, td: td.unflatten(-1, (3, 1)),
    "unflatten(0, (5, 5))": lambda M, td: td.unflatten(0, (5, 5)),
    "flatten, unflatten": lambda M, td: td.flatten(0, 1).unflatten(0, tuple(td.batch_size[:2])),
    "split(1)": lambda M, td: td.split(1),
    "split(3)": lambda M, td: td.split(3),
    "split([1, 3])": lambda M, td: td.split([1, 3]),
    "split([1, 1])": lambda M, td: td.split([1, 1]),
    "split([])": lambda M, td: td.split([]),
    "split(0)": lambda M, td: td.split(0),
    "split(-1)": lambda M, td: td.split(-1),
    "split(2, 1)": lambda M, td: td.split(2, 1),
    "split(2, -1)": lambda M, td: td.split(2, -1),
    "split(2, 9)": lambda M, td: td.split(2, 9),
    "split(99)": lambda M, td: td.split(99),
    "chunk(2)": lambda M, td: td.chunk(2),
    "chunk(3)": lambda M, td: td.chunk(3),
    "chunk(2, 1)": lambda M, td: td.chunk(2, dim=1),
    "chunk(99)": lambda M, td: td.chunk(99),
    "chunk(0)": lambda M, td: td.chunk(0),
    "unbind(0)": lambda M, td: td.unbind(0),
    "unbind(1)": lambda M, td: td.unbind(1),
    "unbind(-1)": lambda M, td: td.unbind(-1),
    "unbind(9)": lambda M, td: td.unbind(9),
    "gather(0)": lambda M, td: td.gather(0, torch.tensor([[0, 1, 0], [1, 0, 1]])),
    "gather(1)": lambda M, td: td.gather(1, torch.tensor([[0], [1], [0], [1]])),
    "gather(-1)": lambda M, td: td.gather(-1, torch.tensor([[0], [1], [0], [1]])),
    "gather out of range": lambda M, td: td.gather(0, torch.tensor([[99, 0, 0]])),
    "gather of the wrong rank": lambda M, td: td.gather(0, torch.tensor([0, 1])),
    "torch.unbind": lambda M, td: torch.unbind(td, 0),
    "torch.split": lambda M, td: torch.split(td, 2, 0),
    "torch.squeeze": lambda M, td: torch.squeeze(td.unsqueeze(0)),
    "torch.unsqueeze": lambda M, td: torch.unsqueeze(td, 1),
    "torch.permute": lambda M, td: torch.permute(td, (1, 0)),
    "torch.transpose": lambda M, td: torch.transpose(td, 0, 1),
    "torch.reshape": lambda M, td: torch.reshape(td, (-1,)),
    "torch.flatten": lambda M, td: torch.flatten(td, 0, 1),
    "torch.unflatten": lambda M, td: torch.unflatten(td, 0, (2, 2)),
    "torch.gather": lambda M, td: torch.gather(td, 0, torch.tensor([[0, 1, 0]])),
    "torch.clone": lambda M, td: torch.clone(td),
    "torch.exp": lambda M, td: torch.exp(td),
    "torch.stack": lambda M, td: torch.stack([td, td + 1]),
    "torch.stack(1)": lambda M, td: torch.stack([td, td + 1], 1),
    "torch.stack(-1)": lambda M, td: torch.stack([td, td + 1], dim=-1),
    "torch.stack(9)": lambda M, td: torch.stack([td, td], 9),
    "torch.stack of one": lambda M, td: torch.stack([td]),
    "torch.stack of a tuple": lambda M, td: torch.stack((td, td)),
    "torch.stack of locked": lambda M, td: torch.stack([td.lock_(), td]),
    "torch.stack with other keys": lambda M, td: torch.stack([td, td.exclude("a")]),
    "torch.stack in another order": lambda M, td: torch.stack([td, td.select(*reversed(list(td.keys())))]),
    "torch.stack of other batches": lambda M, td: torch.stack([td, td[:1]]),
    "torch.stack of other dtypes": lambda M, td: torch.stack([td, td.to(torch.float64)]),
    "torch.stack out": lambda M, td: torch.stack([td, td], out=M.torch.stack([td, td]).zero_()),
    "TensorDict.stack": lambda M, td: M.TensorDict.stack([td, td], 1),
    "torch.cat": lambda M, td: torch.cat([td, td + 1]),
    "torch.cat(1)": lambda M, td: torch.cat([td, td[:, :1]], 1),
    "torch.cat(-1)": lambda M, td: torch.cat([td, td], dim=-1),
    "torch.cat(9)": lambda M, td: torch.cat([td, td], 9),
    "torch.cat of one": lambda M, td: torch.cat([td]),
    "torch.cat with other keys": lambda M, td: torch.cat([td, td.exclude("a")]),
    "torch.cat of other batches": lambda M, td: torch.cat([td, td[:, :1]], 0),
    "TensorDict.cat": lambda M, td: M.TensorDict.cat([td, td], 0),
    "view of locked": lambda M, td: td.lock_().view(-1),
    "unsqueeze of locked": lambda M, td: td.lock_().unsqueeze(0),
    "split of locked": lambda M, td: td.lock_().split(2),
    "unbind of locked": lambda M, td: td.lock_().unbind(0),
    "expand of locked": lambda M, td: td.lock_().expand(2, *td.batch_size),
    "gather of locked": lambda M, td: td.lock_().gather(0, torch.tensor([[0, 1, 0]])),
}
for sample in ("nested", "named", "deep_batch", "cube", "empty", "flat"):
    for name, step in STEPS.items():
        case(f"{sample}.{name}", on(sample, step))
for sample in ("text", "zero_rows", "scalar", "on_cpu"):
    for name in (
        "view(-1)",
        "reshape(-1)",
        "unsqueeze(0)",
        "unsqueeze(-1)",
        "squeeze()",
        "expand(2, *)",
        "split(3)",
        "unbind(0)",
        "torch.clone",
        "flatten()",
        "unflatten(0, (2, 2))",
        "view()",
        "chunk(2)",
    ):
        case(f"{sample}.{name}", on(sample, STEPS[name]))
for sample in SAMPLES:
    case(f"{sample} stacked", lambda M, s=sample: torch.stack([M.sample(s), M.sample(s)]))
    case(f"{sample} stacked last", lambda M, s=sample: torch.stack([M.sample(s), M.sample(s)], -1))
    if SAMPLES[sample].batch:
        case(f"{sample} concatenated", lambda M, s=sample: torch.cat([M.sample(s), M.sample(s)]))
case("stack of nothing", lambda M: M.TensorDict.stack([]))
case("cat of nothing", lambda M: M.TensorDict.cat([]))
case("stack of many", lambda M: torch.stack([M.sample("nested") for _ in range(10)], 1))

# --- context managers write back ---


def context(enter, sample="nested"):
    def program(M):
        td = M.sample(sample)
        with enter(td) as inside:
            seen = M.snap(inside)
            inside["new"] = t(*inside.batch_size, 2)
            inside["a"] = inside["a"] + 1
        return seen, td

    return program


for name, enter in {
    "view": lambda td: td.view(-1),
    "unsqueeze": lambda td: td.unsqueeze(1),
    "squeeze": lambda td: td.squeeze(),
    "permute": lambda td: td.permute(1, 0),
    "transpose": lambda td: td.transpose(0, 1),
    "flatten": lambda td: td.flatten(0, 1),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "unlock_": lambda td: td.lock_().unlock_(),
}.items():
    case(f"with {name}", context(enter))
    case(f"with {name} of named", context(enter, "named"))


class _Singleton:
    """A side whose sample has a singleton dimension in front."""

    def __init__(self, M):
        self._side = M

    def sample(self, name):
        return self._side.sample(name).unsqueeze(0).clone()

    def __getattr__(self, name):
        return getattr(self._side, name)


case("with squeeze of singletons", lambda M: context(lambda td: td.squeeze(0))(_Singleton(M)))

# --- where, masked_fill ---
MASK = torch.tensor([[True, False, True], [False, False, True], [True, True, True], [False, False, False]])
for sample in ("nested", "named"):
    case(f"{sample}.where td", lambda M, s=sample: M.sample(s).where(MASK, M.sample(s).zero_()))
    case(f"{sample}.where scalar", lambda M, s=sample: M.sample(s).where(MASK, 0))
    case(f"{sample}.where rows", lambda M, s=sample: M.sample(s).where(MASK[:, 0], M.sample(s).zero_()))
    case(f"{sample}.where wrong", lambda M, s=sample: M.sample(s).where(MASK[:2], 0))
    case(f"torch.where {sample}", lambda M, s=sample: torch.where(MASK, M.sample(s), M.sample(s).zero_()))
    case(f"{sample}.masked_fill", lambda M, s=sample: (lambda td: (td.masked_fill(MASK, 1), td))(M.sample(s)))
    case(f"{sample}.masked_fill rows", lambda M, s=sample: M.sample(s).masked_fill(MASK[:, 0], 1))
    case(f"{sample}.masked_fill wrong", lambda M, s=sample: M.sample(s).masked_fill(MASK[:2], 1))
    case(f"{sample}.masked_fill_", lambda M, s=sample: (lambda td: (td.masked_fill_(MASK, 1) is td, td))(M.sample(s)))
case("where with other keys", lambda M: M.sample("nested").where(MASK, M.sample("nested").exclude("a")))
case("where with a pad", lambda M: M.sample("nested").where(MASK, M.sample("nested").exclude("a"), pad=9))
case("where in another order", lambda M: M.sample("nested").where(MASK, M.sample("nested").select("n", "a").zero_()))
case(
    "masked_fill float in int",
    lambda M: M.td({"a": t(3, dtype=torch.int64)}, [3]).masked_fill(torch.tensor([True, False, True]), 1.5),
)


@case.parametrize
def test_shape(case: Case) -> None:
    case.check()
