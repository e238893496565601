"""A folder that is removed before its TensorDict: nothing is raised and nothing is printed, in any process."""

from __future__ import annotations

from tests import scripts

PROGRAM = """
import gc, multiprocessing, shutil, tempfile
import torch
from tdstore import TensorDict

def plus(td):
    return td + 1

def mapped():
    folder = tempfile.mkdtemp()
    td = TensorDict({"a": torch.zeros(6), "n": {"b": torch.ones(6)}}, [6]).memmap_(folder)
    return td, folder

if __name__ == "__main__":
    td, folder = mapped()
    shutil.rmtree(folder)
    del td
    gc.collect()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        td, folder = mapped()
        assert td.map(plus, pool=pool)["a"].tolist() == [1] * 6
        shutil.rmtree(folder)
        for _ in range(2):  # the worker lets go of what it was sent before
            assert TensorDict({"a": torch.zeros(6)}, [6]).map(plus, pool=pool)["a"].tolist() == [1] * 6
    with tempfile.TemporaryDirectory() as folder:
        left = TensorDict({"a": torch.zeros(6)}, [6]).memmap(folder)
        left["a"].fill_(2)
    assert left["a"].sum() == 12
"""


def test_a_removed_folder_is_silent(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = scripts.run_file(script)
    assert (done.status, done.errors) == (0, "")
