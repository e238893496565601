"""`tdstore_codecs`: a plugin teaches stores to keep a kind of object, on every backend."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tdstore import Codec, NonTensorData, TensorDict, errors, hookimpl
from tdstore.registry import registry


class Plugin:
    @hookimpl
    def tdstore_codecs(self):
        yield Codec(
            name="fraction", kind=Fraction, encode=lambda f: [f.numerator, f.denominator], decode=lambda v: Fraction(*v)
        )


def test_a_codec_keeps_its_kind(reopened, place):
    td = TensorDict({"a": torch.zeros(3), "f": NonTensorData(Fraction(2, 3), [3])}, [3])
    where = place(reopened)
    with pytest.raises(errors.UntrustedDataError, match="'f'"):
        td.save(**where)
    registry().backends()
    registry().plugins.manager.register(Plugin(), "fractions")
    try:
        owner = td.save(**where)
        again = TensorDict.load(where["location"])
        assert again["f"] == Fraction(2, 3)
        assert again[1]["f"] == Fraction(2, 3)
        again.close()
    finally:
        registry().plugins.manager.unregister(name="fractions")
    with pytest.raises(errors.UntrustedDataError, match="codec 'fraction'"):
        TensorDict.load(where["location"])["f"]
    owner.close()
