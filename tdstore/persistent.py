"""TensorDicts whose entries stay in their file, under the path that code imports them from."""

from __future__ import annotations

from tdstore.tensordicts.persistent.persistent import PersistentTensorDict

__all__ = [
    "PersistentTensorDict",
]
