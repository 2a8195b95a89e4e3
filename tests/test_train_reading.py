"""A training checkpoint's list of tensors is read as data: nothing it names is run, nothing outside its directory is opened."""

import io
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from ladder_residual.train.reading import CheckpointReader, _ListOfTensors


@pytest.fixture
def saved(tmp_path):
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "random": torch.get_rng_state()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path, state


def test_what_torch_wrote_is_read(saved) -> None:
    folder, state = saved
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=CheckpointReader(folder), no_dist=True)
    assert all(torch.equal(found[name], state[name]) for name in state)


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_a_list_that_would_run_code_is_refused(saved, monkeypatch) -> None:
    folder, _ = saved
    monkeypatch.chdir(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"names \w+\.system"):
        CheckpointReader(folder).read_metadata()
    assert not (folder / "pwned").exists()


class Taken:
    """Pickled as Python 3.11.2 pickles members of enumerations."""

    def __init__(self, *given):
        self.given = given

    def __reduce__(self):
        return getattr, self.given


def test_members_of_an_enumeration_may_be_written_as_getattr(saved) -> None:
    folder, _ = saved
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    listed = pickle.dumps(Taken(_MEM_FORMAT_ENCODING, member.name))
    assert _ListOfTensors(io.BytesIO(listed)).load() is member
    for owner, name in ((torch.Size, "__mro__"), (_MEM_FORMAT_ENCODING, "__class__"), (member, "name")):
        (folder / ".metadata").write_bytes(pickle.dumps(Taken(owner, name)))
        with pytest.raises(ValueError, match="which no list of tensors needs"):
            CheckpointReader(folder).read_metadata()


@pytest.mark.parametrize("content", [b"", b"cut", pickle.dumps({"a": 1})])
def test_a_list_that_is_none_is_refused(saved, content: bytes) -> None:
    folder, _ = saved
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="no list of a checkpoint's tensors"):
        CheckpointReader(folder).read_metadata()


def test_a_list_that_leads_elsewhere_is_refused(saved) -> None:
    folder, _ = saved
    metadata = CheckpointReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="leads out of its directory"):
        CheckpointReader(folder).read_metadata()
