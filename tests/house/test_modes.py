"""The modes of the suite: a GPU (`TDSTORE_CUDA=1`), and machines that lack something (`TDSTORE_WITHOUT`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import lacking
from tests.cuda import mode
from tests.house.sources import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_the_mode_of_a_gpu_is_an_error_without_one():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/cuda"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TDSTORE_CUDA": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "TDSTORE_CUDA=1 needs a GPU, and torch" in done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("name", [*mode.AGAIN, *mode.EXCEPT])
def test_the_table_of_second_runs_names_what_is_there(name):
    path, _, test = name.partition("::")
    assert (ROOT / path).exists()
    assert not test or f"def {test}" in (ROOT / path).read_text()
    assert name in mode.AGAIN or name.startswith(mode.AGAIN), "it does not run again anyway"


@pytest.mark.parametrize("name", sorted({start for starts in lacking.ALSO.values() for start in starts}))
def test_the_table_of_needs_names_what_is_there(name):
    path, _, test = name.partition("::")
    assert (ROOT / path).exists()
    assert not test or f"def {test}" in (ROOT / path).read_text()


def test_what_a_test_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(lacking, "LACKING", frozenset({"mypackage", "redis-server", "dask"}))
    assert lacking._imported("import mypackage\n", lacking.AT_THE_TOP) == {"mypackage"}
    assert lacking._imported("from mypackage.part import x\n", lacking.AT_THE_TOP) == {"mypackage"}
    assert lacking._imported("import mypackages\n# import mypackage\n", lacking.AT_THE_TOP) == set()
    inner = "def test():\n    from mypackage import x\n"
    assert lacking._imported(inner, lacking.AT_THE_TOP) == set()
    assert lacking._imported(inner, lacking.IMPORTS) == {"mypackage"}
    assert lacking._imported('x = pytest.importorskip("mypackage")\n', lacking.IMPORTS) == {"mypackage"}
    assert lacking._listed("tests/convert/test_xarray_engine.py::test_chunks_of_dask[h5]") == {"dask"}
    assert lacking._listed("tests/convert/test_tables.py::test_csv_options") == set()
    assert not lacking.cannot_collect(ROOT / "tests" / "servers")
    assert lacking.cannot_collect(ROOT / "tests" / "servers" / "test_servers.py")
    assert not lacking.cannot_collect(Path(tmp_path))
