"""One place for all runs of a session: models to learn from and to train, and texts."""

import pytest

from ladder_residual.models.convert import convert


@pytest.fixture(scope="session")
def ground(demo_dir, tmp_path_factory):
    """The original, copies with all or half of the layers converted, a text to learn from and one to measure on."""
    folder = tmp_path_factory.mktemp("adapt")
    convert(demo_dir, folder / "original", "standard", copy=True)
    convert(folder / "original", folder / "ladder", "ladder")
    convert(folder / "original", folder / "half", "ladder:last-half")
    stories = (demo_dir / "stories.txt").read_text(encoding="utf-8")
    stories = stories.replace("\n\n", "\n\n<|endoftext|>\n")  # a document keeps one line break
    (folder / "train.txt").write_text(stories[:20000], encoding="utf-8")
    (folder / "heldout.txt").write_text(stories[20000:], encoding="utf-8")
    return folder
