"""Packing and mixing what a student learns from."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.corpora import write_corpus
from ladder_residual.data import encoder as encoding
from ladder_residual.data.corpus_rows import IGNORE_INDEX
from ladder_residual.data.encoder import CONTEXT, LEARN, PADDING, Chunk
from ladder_residual.data.packing import MixedRows, RowStore, build_mixture, build_rows, collate, pack


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


DOCUMENTS = 3000  # in three files of a thousand; each document is 10 tokens, its own number (in base 400) among them


@pytest.fixture
def numbers(hub, monkeypatch):
    """A hub dataset of numbered documents, and the list of those that were read."""
    folder = hub / "numbers"
    folder.mkdir()
    for start in range(0, DOCUMENTS, 1000):
        rows = [{"ids": [3 + number // 400, 3 + number % 400, *range(50, 57)]} for number in range(start, start + 1000)]
        lines(folder / f"train-{start:04}.jsonl", *rows)
    read = []
    document_of = encoding.document_of
    monkeypatch.setattr(encoding, "document_of", lambda row, place: read.append(row["ids"]) or document_of(row, place))
    return read


def opened(encoder, folder, *sources, rows=40, **options):
    paths, weights = zip(*(sources or [("owner/numbers", 1.0)]), strict=True)
    return build_mixture(paths, weights, encoder, 20, folder, rows=rows, **options)


def documents(store):
    """The numbers of the documents in a store, in the order of its rows."""
    return [int((a - 3) * 400 + b - 3) for a, b in np.asarray(store.ids).astype(int).reshape(-1, 10)[:, :2]]


def test_a_hub_dataset_is_read_only_as_far_as_a_run_asks(encoder, tmp_path, numbers):
    (store,) = opened(encoder, tmp_path / "rows")
    assert len(store) == 40  # as many as a run of 40 rows visits
    assert len(numbers) == 80  # two documents fill a row
    drawn = documents(store)
    assert len(set(drawn)) == 80
    assert drawn != sorted(drawn)
    assert max(drawn) - min(drawn) > 300  # from all over the buffer, not the first that came


def test_a_longer_run_reads_more_and_the_same_run_reads_nothing(encoder, tmp_path, numbers):
    (short,) = opened(encoder, tmp_path / "rows")
    numbers.clear()
    (again,) = opened(encoder, tmp_path / "rows")
    assert again.ids.filename == short.ids.filename
    assert numbers == []  # what is resumed finds its rows, without the hub
    (longer,) = opened(encoder, tmp_path / "rows", rows=80)
    assert len(longer) == 80
    assert documents(longer)[:80] == documents(short)  # it goes on where the shorter one stopped
    (other,) = opened(encoder, tmp_path / "rows", seed=1)
    assert documents(other) != documents(short)
    (made_anew,) = opened(encoder, tmp_path / "elsewhere")
    assert documents(made_anew) == documents(short)  # a matter of the seed alone


def test_files_of_a_hub_dataset_come_in_an_order_of_the_seed(encoder, tmp_path, numbers):
    first = {documents(opened(encoder, tmp_path / "rows", seed=seed)[0])[0] // 1000 for seed in range(8)}
    assert len(first) > 1


def test_where_a_hub_dataset_has_less_than_asked_for_or_epochs_decide_all_is_read(encoder, tmp_path, numbers):
    (store,) = opened(encoder, tmp_path / "rows", rows=DOCUMENTS // 2 + 400)
    assert len(store) == DOCUMENTS // 2
    (whole,) = opened(encoder, tmp_path / "rows", rows=None)
    assert documents(whole) == list(range(DOCUMENTS))
    assert sorted(documents(store)) == list(range(DOCUMENTS))


def test_shares_of_a_mixture_are_read_and_files_packed_whole(encoder, tmp_path, numbers):
    path = lines(tmp_path / "own.jsonl", *({"ids": [7] * 9} for _ in range(200)))
    hub, own = opened(encoder, tmp_path / "rows", ("owner/numbers", 3.0), (path, 1.0))
    assert (len(hub), len(own)) == (30, 100)
    mixed = MixedRows([hub, own], [3.0, 1.0], rows=40)
    assert mixed.counts == [30, 10]
    assert len({row for source, row in mixed.order if source == 0}) == 30  # every row that was read is visited once
    tiny, _ = opened(encoder, tmp_path / "rows", ("owner/numbers", 1e-9), (path, 1.0))  # a share that rounds to nothing
    assert len(tiny) == 1


def test_a_broken_row_of_a_hub_dataset_is_named(hub, encoder, tmp_path):
    (hub / "broken").mkdir()
    lines(hub / "broken" / "train.jsonl", {"title": "no"})
    with pytest.raises(ValueError, match=r"owner/broken \(shuffled by seed 0\), row 1: has none of text"):
        opened(encoder, tmp_path / "rows", ("owner/broken", 1.0))


@pytest.mark.parametrize("content", ["", "\n\n", "<|endoftext|>\n"])
def test_an_empty_file_is_refused(tmp_path, encoder, content):
    path = tmp_path / "empty.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="is empty"):
        build_rows(str(path), encoder, 16, tmp_path / "rows")
    assert list((tmp_path / "rows").iterdir()) == []  # nothing half-made stays


@pytest.mark.parametrize("damage", ["short", "empty", "other length", "other vocabulary", "gone"])
def test_damaged_rows_are_named(tmp_path, encoder, damage):
    """They are kept beside the checkpoints of a run, and found there when it goes on."""
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a dog.\n" * 50, encoding="utf-8")
    build_rows(str(path), encoder, 16, tmp_path / "rows")
    (folder,) = (tmp_path / "rows").iterdir()
    ids = (folder / "ids").read_bytes()
    changed = {"short": ids[:-7], "empty": b"", "other length": ids[:-64], "other vocabulary": ids[:-4] + b"\xff\xff\0\0"}
    (folder / "ids").unlink()
    if damage in changed:
        (folder / "ids").write_bytes(changed[damage])
    with pytest.raises(ValueError, match=r"the rows in .* are damaged: delete that folder"):
        build_rows(str(path), encoder, 16, tmp_path / "rows")


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=30), st.integers(2, 24))
def test_packing_loses_nothing_and_keeps_chats_whole(sizes, sequence):
    number = iter(range(1, 10_000))
    chunks = [
        Chunk([next(number) for _ in range(size)], [LEARN] * size, whole and size <= sequence, "here") for size, whole in sizes
    ]
    packed = list(pack(iter(chunks), sequence, padding=0))
    assert all(len(ids) == len(use) == sequence for ids, use in packed)
    real = sorted(token for ids, use in packed for token, kind in zip(ids, use, strict=True) if kind != PADDING)
    everything = sorted(token for chunk in chunks for token in chunk.ids)
    assert len(everything) - len(real) <= 2  # a rest of one token predicts nothing
    assert set(real) <= set(everything)
    for chunk in chunks:
        if chunk.whole and len(chunk.ids) > 1:
            assert sum(chunk.ids[0] in ids and chunk.ids[-1] in ids for ids, _ in packed) == 1


def test_a_chat_longer_than_a_row(encoder):
    long = Chunk(list(range(1, 31)), [LEARN] * 30, True, "file, line 9")
    with pytest.raises(ValueError, match=r"file, line 9: a chat of 30 tokens does not fit a row of 16"):
        list(pack(iter([long]), 16, 0))
    assert list(pack(iter([long]), 16, 0, "drop")) == []
    assert len(list(pack(iter([long]), 16, 0, "split"))) == 2


def test_rows_say_what_counts(tmp_path, encoder, chat):
    path = lines(tmp_path / "chat.jsonl", {"messages": chat[:2]}, {"messages": chat})
    store = build_rows(path, encoder, 96, tmp_path / "rows")
    assert store.padded
    row = store.row(0)
    use = np.asarray(store.use[0])
    assert ((row["labels"] != IGNORE_INDEX) == (use == LEARN)).all()
    assert (row["counted"] == (use != PADDING)).all()
    assert CONTEXT in use
    batch = collate([store.row(0), store.row(0)])
    assert batch["input_ids"].shape == batch["counted"].shape == (2, 96)
    assert build_rows(path, encoder, 96, tmp_path / "rows").ids.filename == store.ids.filename  # made once


def test_a_prepared_corpus_gives_its_documents(tmp_path, encoder):
    write_corpus(tmp_path / "corpus", [[5, 6, 7], [8, 9]], vocab_size=512, end_of_document=encoder.end)
    store = build_rows(str(tmp_path / "corpus"), encoder, 4, tmp_path / "rows")
    assert store.ids.reshape(-1)[:7].tolist() == [5, 6, 7, encoder.end, 8, 9, encoder.end]


def stores(*sizes):
    return [RowStore(np.full((size, 4), source), np.full((size, 4), LEARN, np.uint8)) for source, size in enumerate(sizes)]


def test_shares_follow_the_weights_and_the_order_the_seed():
    mixed = MixedRows(stores(50, 10), [0.75, 0.25], rows=80, seed=3)
    sources = [int(mixed[index]["input_ids"][0]) for index in range(len(mixed))]
    assert (sources.count(0), sources.count(1)) == (60, 20)
    visits = np.bincount([row for source, row in mixed.order if source == 1], minlength=10)
    assert visits.tolist() == [2] * 10  # whole rounds before a row comes a third time
    again, other = (MixedRows(stores(50, 10), [0.75, 0.25], rows=80, seed=seed) for seed in (3, 4))
    assert (again.order == mixed.order).all()
    assert (other.order != mixed.order).any()


def test_epochs_without_a_number_of_tokens():
    assert len(MixedRows(stores(7, 5), [1, 1], rows=None, epochs=2)) == 24
