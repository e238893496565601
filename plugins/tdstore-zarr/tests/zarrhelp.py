"""What the tests of this plugin share."""

from __future__ import annotations

from functools import partial

from tdstore_zarr.store import open_zarr

from tdstore.testing.crash import NEW, OLD
from tdstore.testing.samples import bits
from tdstore.testing.setup import fill
from tdstore.testing.setup import header_for as header_of
from tdstore.testing.setup import load as load_from
from tdstore.testing.setup import read_all as everything
from tdstore.testing.setup import same_leaves as same
from tdstore.testing.setup import save as save_to

save = partial(save_to, open_zarr)
load = partial(load_from, open_zarr)

__all__ = ["NEW", "OLD", "bits", "everything", "fill", "header_of", "load", "same", "save"]
