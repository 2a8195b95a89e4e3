"""Reading, encoding, packing and mixing what a student learns from."""

import json
import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ladder_residual.adapt import entries
from ladder_residual.adapt.entries import Entry, hub_name, read_entries
from ladder_residual.adapt.rows import (
    CONTEXT,
    IGNORED,
    LEARN,
    PADDING,
    Encoder,
    MixedRows,
    Piece,
    RowStore,
    build_rows,
    collate,
    open_sources,
    pack,
)
from ladder_residual.adapt.settings import Settings, Source
from ladder_residual.corpus.tokens import read_tokenizer
from ladder_residual.corpus.writing import write_corpus

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CHAT = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "A dog."},
]


@pytest.fixture
def encoder(demo_dir):
    tokenizer = read_tokenizer(demo_dir)
    tokenizer.chat_template = TEMPLATE
    return Encoder(tokenizer, 512)


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_every_shape_of_entry_is_read(tmp_path):
    path = lines(
        tmp_path / "a.jsonl",
        {"text": "Once upon a time"},
        {"ids": [5, 6, 7]},
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"prompt": "2+2?", "completion": "4"},
        {"question": "3+3?", "answer": "6"},
        {"instruction": "Add", "input": "1 and 2", "output": "3"},
    )
    entries = list(read_entries(path))
    assert entries[0].text == "Once upon a time"
    assert entries[1].ids == [5, 6, 7]
    assert entries[2].messages == CHAT
    assert entries[3].messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert entries[6].messages[0]["content"] == "Add\n\n1 and 2"
    assert entries[5].where.endswith("a.jsonl, line 6")


def test_documents_of_a_text_file_are_told_apart(tmp_path):
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"one\ntwo\n<|endoftext|>\nthree\n<|endoftext|>\n\n"))
    assert [(entry.text, entry.where.rpartition(" ")[2]) for entry in read_entries(str(path))] == [
        ("one\ntwo\n", "1"),
        ("three\n", "4"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "fine"}\n{"text": \n', "line 2: not JSON"),
        ('{"text": "fine"}\n\n[1, 2]\n', "line 3: expected an object"),
        ('{"title": "no"}\n', "line 1: has none of text"),
        ('{"text": 7}\n', "line 1: text must be text"),
        ('{"text": "  "}\n', "line 1: text must be text, not empty"),
        ('{"ids": []}\n', "line 1: ids must be"),
        ('{"ids": [1, "2"]}\n', "line 1: ids must be"),
        ('{"messages": [{"role": "user", "content": "?"}]}\n', "line 1: a chat without an answer"),
        ('{"messages": [{"role": "cat", "content": "?"}]}\n', "line 1: unknown role 'cat'"),
        ('{"messages": ["hello"]}\n', "line 1: a message is an object with role and content, got a str of 5 characters"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        list(read_entries(str(path)))


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "cut.txt.xz").write_bytes(lzma.compress(b"x" * 1000)[:40])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "a.csv").write_text("a,b")
    for name, message in [
        ("cut.txt.xz", "cut short"),
        ("latin.txt", "no UTF-8"),
        ("a.csv", "use .txt or .jsonl"),
        ("none.txt", "no data file"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(read_entries(str(tmp_path / name)))


def test_hub_datasets_are_told_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("owner/Made-2.5") == ("owner/Made-2.5", None)
    assert hub_name("owner/Made-2.5:Gen") == ("owner/Made-2.5", "Gen")
    assert hub_name("owner/made.jsonl") is None
    assert hub_name("made") is None
    (tmp_path / "owner" / "Made-2.5").mkdir(parents=True)
    assert hub_name("owner/Made-2.5") is None


def test_subsets_of_hub_datasets_are_told_apart(hub):
    """Two subsets and no default."""
    (hub / "Made-2.5").mkdir()
    for subset in ("7M", "Gen"):
        (hub / "Made-2.5" / f"{subset}.jsonl").write_text(json.dumps({"text": f"of {subset}"}) + "\n")
    front = "".join(f"- config_name: {subset}\n  data_files: {subset}.jsonl\n" for subset in ("7M", "Gen"))
    (hub / "Made-2.5" / "README.md").write_text(f"---\nconfigs:\n{front}---\n")
    for subset in ("7M", "Gen"):
        assert [entry.text for entry in read_entries(f"owner/Made-2.5:{subset}")] == [f"of {subset}"]
    with pytest.raises(ValueError, match=r"(?s)owner/Made-2.5 is no file, and reading it from the hub failed.*Gen"):
        list(read_entries("owner/Made-2.5"))


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
    entry_of = entries.entry_of
    monkeypatch.setattr(entries, "entry_of", lambda row, where: read.append(row["ids"]) or entry_of(row, where))
    return read


def opened(encoder, folder, source="owner/numbers", **changes):
    settings = Settings(
        **dict(student="s", method="sft", data=(Source(source),), sequence=20, batch_tokens=80, tokens=800) | changes
    )
    return open_sources(settings, encoder, folder, lambda line: None)


def documents(store):
    """The numbers of the documents in a store, in the order of its rows."""
    return [int((a - 3) * 400 + b - 3) for a, b in np.asarray(store.ids).astype(int).reshape(-1, 10)[:, :2]]


def test_a_hub_dataset_is_read_only_as_far_as_a_run_asks(encoder, tmp_path, numbers):
    (store,) = opened(encoder, tmp_path / "rows")
    assert len(store) == 40  # 800 tokens in rows of 20
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
    (longer,) = opened(encoder, tmp_path / "rows", tokens=1600)
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
    (store,) = opened(encoder, tmp_path / "rows", tokens=DOCUMENTS * 10 + 8000)
    assert len(store) == DOCUMENTS // 2
    (whole,) = opened(encoder, tmp_path / "rows", tokens=None)
    assert documents(whole) == list(range(DOCUMENTS))
    assert sorted(documents(store)) == list(range(DOCUMENTS))


def test_shares_of_a_mixture_are_read_and_files_packed_whole(encoder, tmp_path, numbers):
    path = lines(tmp_path / "own.jsonl", *({"ids": [7] * 9} for _ in range(200)))
    sources = (Source("owner/numbers", 3.0), Source(path, 1.0))
    hub, own = opened(encoder, tmp_path / "rows", data=sources)
    assert (len(hub), len(own)) == (30, 100)
    mixed = MixedRows([hub, own], [3.0, 1.0], rows=40)
    assert mixed.counts == [30, 10]
    assert len({row for source, row in mixed.order if source == 0}) == 30  # every row that was read is visited once
    tiny = (Source("owner/numbers", 1e-9), Source(path, 1.0))  # a share that rounds to nothing
    assert len(opened(encoder, tmp_path / "rows", data=tiny)[0]) == 1


def test_a_broken_row_of_a_hub_dataset_is_named(hub, encoder, tmp_path):
    (hub / "broken").mkdir()
    lines(hub / "broken" / "train.jsonl", {"title": "no"})
    with pytest.raises(ValueError, match=r"owner/broken \(shuffled by seed 0\), row 1: has none of text"):
        opened(encoder, tmp_path / "rows", source="owner/broken")


@pytest.mark.parametrize("content", ["", "\n\n", "<|endoftext|>\n"])
def test_an_empty_file_is_refused(tmp_path, encoder, content):
    path = tmp_path / "empty.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="is empty"):
        build_rows(str(path), encoder, 16, tmp_path / "rows")
    assert list((tmp_path / "rows").iterdir()) == []  # nothing half-made stays


def test_only_answers_of_a_chat_are_learned(encoder):
    piece = encoder.piece(Entry("here", messages=CHAT))
    text = encoder.tokenizer.decode([token for token, use in zip(piece.ids, piece.use, strict=True) if use == LEARN])
    assert all(word in text for word in ("cat", "dog"))
    assert not any(word in text for word in ("Who", "then", "[user]"))
    whole = encoder.tokenizer.decode(piece.ids)
    assert whole.split() == TEMPLATED.split()
    everything = Encoder(encoder.tokenizer, 512, answers_only=False).piece(Entry("here", messages=CHAT))
    assert set(everything.use) == {LEARN}
    assert everything.ids == piece.ids


TEMPLATED = "[user] Who are you? [end] [assistant] A cat. [end] [user] And then? [end] [assistant] A dog. [end]"


def test_a_template_that_rewrites_its_past_is_refused(demo_dir):
    tokenizer = read_tokenizer(demo_dir)
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        Encoder(tokenizer, 512).piece(Entry("here", messages=CHAT))


def test_a_chat_needs_a_template(demo_dir):
    with pytest.raises(ValueError, match="no chat template"):
        Encoder(read_tokenizer(demo_dir), 512).piece(Entry("here", messages=CHAT))


def test_tokens_outside_the_vocabulary_are_named(encoder):
    with pytest.raises(ValueError, match="here: token 512 is outside"):
        encoder.piece(Entry("here", ids=[4, 512]))
    with pytest.raises(ValueError, match="made by another tokenizer"):
        encoder.piece(Entry("here", ids=[4], tokenizer="0" * 16))


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=30), st.integers(2, 24))
def test_packing_loses_nothing_and_keeps_chats_whole(sizes, sequence):
    number = iter(range(1, 10_000))
    pieces = [
        Piece([next(number) for _ in range(size)], [LEARN] * size, whole and size <= sequence, "here") for size, whole in sizes
    ]
    packed = list(pack(iter(pieces), sequence, padding=0))
    assert all(len(ids) == len(use) == sequence for ids, use in packed)
    real = sorted(token for ids, use in packed for token, kind in zip(ids, use, strict=True) if kind != PADDING)
    everything = sorted(token for piece in pieces for token in piece.ids)
    assert len(everything) - len(real) <= 2  # a rest of one token predicts nothing
    assert set(real) <= set(everything)
    for piece in pieces:
        if piece.whole and len(piece.ids) > 1:
            assert sum(piece.ids[0] in ids and piece.ids[-1] in ids for ids, _ in packed) == 1


def test_a_chat_longer_than_a_row(encoder):
    long = Piece(list(range(1, 31)), [LEARN] * 30, True, "file, line 9")
    with pytest.raises(ValueError, match=r"file, line 9: a chat of 30 tokens does not fit a row of 16"):
        list(pack(iter([long]), 16, 0))
    assert list(pack(iter([long]), 16, 0, "drop")) == []
    assert len(list(pack(iter([long]), 16, 0, "split"))) == 2


def test_rows_say_what_counts(tmp_path, encoder):
    path = lines(tmp_path / "chat.jsonl", {"messages": CHAT[:2]}, {"messages": CHAT})
    store = build_rows(path, encoder, 96, tmp_path / "rows")
    assert store.padded
    row = store.row(0)
    use = np.asarray(store.use[0])
    assert ((row["labels"] != IGNORED) == (use == LEARN)).all()
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
