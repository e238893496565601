"""What tdstore writes is read by the released `tensordict` package: one file of each format that both have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data import open_ours_there as there

pytest.importorskip("tensordict")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    there.write(folder)
    return folder


@pytest.mark.parametrize("form", ["memmap", "lazy", "h5", "state_dict", "zarr", "tdz", "consolidated"])
def test_the_release_reads_what_is_written_here(form: str, written: Path) -> None:
    there.readers()[form](written)
