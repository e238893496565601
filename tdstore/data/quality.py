"""How well an order of an epoch is shuffled."""

from typing import NamedTuple

import numpy as np

from tdstore.errors import InvalidArgumentError

from .epochs import Epochs


class ShuffleQuality(NamedTuple):
    """Measures of one epoch, each compared with that of a full shuffle."""

    rank_correlation: float
    """Spearman's correlation of places and items: 0 for a full shuffle, 1 for none."""
    displacement: float
    """Mean distance of an item from its place, divided by that of a full shuffle, a third of the items."""
    batch_spread: float
    """Mean standard deviation of the item numbers in a batch, divided by that of a full shuffle."""


def measure_shuffle(epochs: Epochs, epoch: int = 0, batches: int = 1000) -> ShuffleQuality:
    """Measure the order of an epoch on a sample of its batches, without reading rows.

    Args:
        epochs: the dataset and the shuffle.
        epoch: the number of the epoch.
        batches: how many batches are sampled, evenly over the epoch.

    Raises:
        InvalidArgumentError: no batch is full, or batches are of one item.

    Example:
        >>> td = tdstore.TensorDict({"a": torch.arange(100_000)}, [100_000])
        >>> full = measure_shuffle(Epochs(td, 64))
        >>> abs(full.rank_correlation) < 0.02, round(full.displacement, 1), round(full.batch_spread, 1)
        (True, 1.0, 1.0)
        >>> measure_shuffle(Epochs(td, 64, shuffle=False)).batch_spread < 0.001
        True
    """
    size, batch = epochs.windows.size, epochs.batch_size * epochs.world_size
    if batch < 2 or size < batch:
        raise InvalidArgumentError(
            f"the shuffle of {size} items in batches of {batch}: it takes a full batch of 2 or more"
        )
    numbers = np.unique(np.linspace(0, size // batch - 1, batches).astype(np.int64))
    places = numbers[:, None] * batch + np.arange(batch)
    items = epochs.order(epoch)(places.reshape(-1)).reshape(places.shape)
    correlation = np.corrcoef(places.reshape(-1), items.reshape(-1))[0, 1]
    # The mean distance of two places drawn at random is (n - 1/n) / 3; the deviation of n consecutive numbers as below.
    displacement = np.abs(places - items).mean() / max((size - 1 / size) / 3, 1e-12)
    deviation = np.sqrt((size**2 - 1) / 12)
    spread = items.std(axis=1, ddof=1).mean() / max(deviation, 1e-12)
    return ShuffleQuality(float(correlation), float(displacement), float(spread))
