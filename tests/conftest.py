"""Shared fixtures. One thread per process: the machine's cores are for the ranks."""

import gc
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach the network
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

import ladder_residual  # noqa: F401  (lets the Auto classes know rewired checkpoints)
from tests.eval_files import write_tasks

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any test imports the engine's kernels: they are bound to it then
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell inherits it so: Ctrl-C is tested there too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: to look through it again takes half a second, and a Trainer asks for that at every end


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_dir():
    from ladder_residual.bench.demo import demo_directory

    return demo_directory()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A directory stands for the hub: ``owner/name`` is read from ``name`` in it, as a stream, by the hub's own client."""
    datasets = pytest.importorskip("datasets")
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *rest, **options: load(str(tmp_path / name.partition("/")[2]), *rest, **options)
    )
    return tmp_path


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory):
    """Files of evaluation tasks."""
    return write_tasks(tmp_path_factory.mktemp("eval") / "tasks")


@pytest.fixture(scope="session")
def story_text(task_folder, demo_dir):
    path = task_folder.parent / "stories.txt"
    path.write_text((demo_dir / "stories.txt").read_text(encoding="utf-8")[:3000], encoding="utf-8")
    return path
