"""Maths on whole TensorDicts: arithmetic, reductions, running statistics, clipping, comparisons, norms."""

import torch
from tensordict import TensorDict
from tensordict.utils import assert_close


class RunningNorm:
    """Welford's algorithm over batches of any structure."""

    def __init__(self, example):
        self.mean = torch.zeros_like(example.double())
        self.m2 = self.mean.clone()
        self.count = 0

    def update(self, batch):
        for row in batch.double().unbind(0):
            self.count += 1
            delta = row - self.mean
            self.mean += delta / self.count
            self.m2 += delta * (row - self.mean)
        return self

    @property
    def std(self):
        return (self.m2 / max(self.count - 1, 1)).sqrt()


def show(td, digits=3):
    return {k: torch.round(v.double(), decimals=digits).tolist() for k, v in sorted(td.flatten_keys(".").items())}


def main():
    rng = torch.Generator().manual_seed(0)
    td = TensorDict({"a": torch.randn(20, 2, generator=rng), "n": {"b": torch.rand(20, generator=rng) * 10}}, [20])
    stats = RunningNorm(td[0]).update(td)
    assert_close(stats.mean.float(), td.mean(0), rtol=1e-5, atol=1e-6)
    assert_close(stats.std.float(), td.std(0), rtol=1e-4, atol=1e-5)
    print(stats.count, stats.std.batch_size, show(stats.mean))
    scaled = ((td - td.mean(0)) / td.std(0)).clamp(-1.5, 1.5)
    print(show(scaled.amax(0)), scaled.batch_size)

    print(show(td.sum(dim=0)), show(td.mean(dim=0)), td.sum().batch_size, td.sum(dim="feature").batch_size)
    print(show(td[:3].sum(dim="feature")), round(td.sum(reduce=True).item(), 3))
    print(show(td.var(dim=0)), show(td.prod(dim=0) * 0), td.mean(0, keepdim=True).batch_size)
    low, high = td.min(dim=0), td.max(dim=0)
    print(type(low).__name__, show(low.values), high.indices["n", "b"].item())
    print(td.norm().batch_size, round(td.norm()["n", "b"].item(), 3), show(td.abs().log1p().sum(0)))
    print(td.isfinite().all(), td.isnan().any(), (td > 5).any(), (td["n"] >= 0).all(), (td == td).all(dim=0).batch_size)

    other = torch.ones_like(td)
    print(
        show(torch.zeros_like(td[:1]) + 2 * other[:1] - 1),
        (td + other - other - td).abs().max(0).values["a"].max().item() < 1e-5,
    )
    print(show((other[:1] * 4).sqrt().pow(3) / 2), show(-other[:1]), show(1 / (other[:1] * 4)), show(2 - other[:1]))
    accumulator = torch.zeros_like(td[0])
    for row in td[:5].unbind(0):
        accumulator += row
    print(torch.allclose(accumulator["a"], td["a"][:5].sum(0)), show(accumulator.zero_()))
    td_int = TensorDict({"i": torch.tensor([1, 2, 3, 4]), "m": torch.tensor([True, False, True, True])}, [4])
    print(show(td_int.sum(0)), show(td_int["i"].float().mean().expand(1) * other[:1].select("n")["n"]))
    print(show((td_int.select("i") % 2)), show(td_int.select("i").pow(2)), show(~td_int.select("m")))
    ema = td.mean(0)
    for chunk in td.split(5):
        ema = ema.lerp(chunk.mean(0), 0.25)
    print(show(ema))
    print(show(td.quantile(0.5, dim=0)))
    print(show(torch.maximum(td, other).amin(0)), show(td[:2].softmax(0).sum(0)))
    print(show(td.float().half().float().mean(0), 1), td.to(torch.float64)["a"].dtype, td_int.float()["m"].tolist())
    history = torch.stack([td.mean(0) * i for i in range(4)])
    print(history.batch_size, show(history.std(0)))
