"""A checkpoint's list of tensors is read as data: nothing it names is run, nothing outside its directory is opened."""

import io
import os
import pickle
import resource
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from ladder_residual.train.dcp_checkpoint import METADATA, load_tensors, save_tensors, stored_tensors
from tests.forged import Payload, forge_metadata

STATE = {"model.a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "step": torch.tensor(3.0)}


@pytest.fixture
def saved(tmp_path):
    save_tensors(STATE, tmp_path / "saved", None)
    return tmp_path / "saved"


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}


def test_what_was_saved_is_loaded(saved):
    found = zeros()
    load_tensors(found, saved, None)
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)
    stored = stored_tensors(saved)
    assert {name: (entry.size, entry.properties.dtype) for name, entry in stored.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in STATE.items()
    }


def test_what_torch_itself_reads_is_the_same(saved):
    ours, theirs = stored_tensors(saved), dcp.FileSystemReader(saved).read_metadata().state_dict_metadata
    assert ours == theirs


def test_only_tensors_are_saved(tmp_path):
    with pytest.raises(TypeError, match="step is no tensor"):
        save_tensors({"a": torch.ones(1), "step": 3}, tmp_path / "x", None)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("kind", "message"), [("pickle", r"names \w+\.open"), ("bytes", "model.a is a pickled object")])
def test_a_list_that_would_run_code_is_refused(saved, tmp_path, kind, message):
    forge_metadata(saved, kind, tmp_path / "marker")
    for read in (stored_tensors, lambda folder: load_tensors(zeros(), folder, None)):
        with pytest.raises(ValueError, match=message) as caught:
            read(saved)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "marker").exists()


class Given:
    """Pickled as a call of ``function``, and then with ``state``."""

    def __init__(self, function, *arguments, state=None):
        self.function, self.arguments, self.state = function, arguments, state

    def __reduce__(self):
        return self.function, self.arguments, self.state


def test_members_of_an_enumeration_may_be_written_as_getattr(saved):
    """As Python 3.11.2 writes them. Nothing is taken from anything: the call is recorded."""
    metadata = pickle.loads((saved / METADATA).read_bytes())
    member = Given(getattr, _MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")
    for entry in metadata.state_dict_metadata.values():
        properties = entry.properties
        entry.properties = Given(type(properties), state=(properties.dtype, torch.strided, False, member, False))
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    assert {name: entry.size for name, entry in stored_tensors(saved).items()} == {name: t.shape for name, t in STATE.items()}
    (saved / METADATA).write_bytes(pickle.dumps(Given(getattr, torch.Size, "__mro__")))
    with pytest.raises(ValueError, match="expected Metadata, found getattr"):
        stored_tensors(saved)


def test_a_pickle_cannot_change_the_classes_it_names(saved):
    """BUILD with slots sets attributes of whatever object it is given, also of a class."""
    name = torch.distributed.checkpoint.metadata.Metadata.__module__
    forged = f"c{name}\nMetadata\n(N(dS'__init__'\nS'x'\nstb.".encode()
    before = torch.distributed.checkpoint.metadata.Metadata.__init__
    (saved / METADATA).write_bytes(forged)
    with pytest.raises(ValueError, match="no list of a checkpoint's tensors"):
        stored_tensors(saved)
    assert torch.distributed.checkpoint.metadata.Metadata.__init__ is before


@pytest.mark.parametrize("content", [b"", b"cut", pickle.dumps({"a": 1})])
def test_a_list_that_is_none_is_refused(saved, content):
    (saved / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match="no list of a checkpoint's tensors"):
        stored_tensors(saved)


def test_a_list_that_leads_elsewhere_is_refused(saved):
    metadata = pickle.loads((saved / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="leads out of its directory"):
        stored_tensors(saved)


def test_damaged_and_foreign_checkpoints_are_one_line(saved):
    other = zeros() | {"model.a": torch.zeros(4, 4)}
    with pytest.raises(ValueError, match="cannot load .*saved: .*[Ss]ize") as caught:
        load_tensors(other, saved, None)
    assert "\n" not in str(caught.value)
    torch.save(Payload(saved / "marker"), saved / "__0_0.distcp")
    with pytest.raises(ValueError, match="cannot load .*saved"):
        load_tensors(zeros(), saved, None)
    assert not (saved / "marker").exists()
    (saved / METADATA).unlink()
    with pytest.raises(ValueError, match="cannot read .*No such file"):
        stored_tensors(saved)


def test_a_few_bytes_do_not_take_all_memory(saved):
    """An unpickler makes room for as many objects as a pickle counts."""
    (saved / METADATA).write_bytes(b"\x80\x02}r" + (1 << 29).to_bytes(4, "little") + b".")
    with pytest.raises(ValueError, match="it counts 536870912 objects in 9 bytes"):
        stored_tensors(saved)


def test_a_tensor_that_unpacks_to_more_than_its_file_is_not_read(saved):
    """An archive can be compressed, which torch.load undoes."""
    file = saved / "__0_0.distcp"
    metadata = pickle.loads((saved / METADATA).read_bytes())
    place = metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "model.a")]
    with file.open("rb") as content:
        content.seek(place.offset)
        tensor = content.read(place.length)
    repacked = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(tensor)) as good, zipfile.ZipFile(repacked, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in good.infolist():
            more = bytes(1 << 20) if entry.filename.endswith("/data/0") else b""
            archive.writestr(entry.filename, good.read(entry) + more)
    place.offset, place.length = file.stat().st_size, len(repacked.getvalue())
    file.write_bytes(file.read_bytes() + repacked.getvalue())
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"cannot load .*__0_0.distcp unpacks to 10[0-9]{5} bytes, and has [0-9]{4}$"):
        load_tensors(zeros(), saved, None)


def test_a_pipe_is_not_waited_for(saved):
    (saved / METADATA).unlink()
    os.mkfifo(saved / METADATA)
    with pytest.raises(ValueError, match="is not a file"):
        stored_tensors(saved)


def test_a_failed_save_is_an_exception(tmp_path):
    """Torch's own is none, and would pass every handler as a traceback."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(RuntimeError):
            save_tensors(STATE, tmp_path / "small", None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
