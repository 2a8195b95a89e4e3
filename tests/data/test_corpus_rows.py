"""Shards and rows: every token once an epoch, whatever the ranks and steps; damaged directories are named."""

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.corpora import write_corpus
from ladder_residual.data.corpus import Corpus, dtype_for
from ladder_residual.data.corpus_rows import IGNORE_INDEX, CorpusRows
from ladder_residual.data.permutation import SORTED_BELOW, permuted
from tests.tiny_models import tiny_model

END = 0


def numbered_documents(lengths):
    """Documents in which every token but the last is another number, so that a lost or repeated one shows."""
    count = 0
    for length in lengths:
        yield list(range(count + 1, count + 1 + length))
        count += length


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(
        tmp_path / "corpus", numbered_documents([5, 1, 9, 30, 2, 2, 7]), vocab_size=100, end_of_document=END, shard_tokens=12
    )


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000, SORTED_BELOW, SORTED_BELOW + 1, 100_003])
def test_a_shuffle_is_a_bijection_and_differs_by_seed_and_epoch(size):
    everything = np.arange(size)
    shuffles = [permuted(everything, size, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for shuffle in shuffles:
        assert np.array_equal(np.sort(shuffle), everything)
    if size > 10:
        assert len({shuffle.tobytes() for shuffle in [everything, *shuffles]}) == 5
    if size >= 1000:
        assert abs(np.corrcoef(everything, shuffles[0])[0, 1]) < 0.1
        assert abs(np.corrcoef(shuffles[0][:-1], shuffles[0][1:])[0, 1]) < 0.1


def test_a_shuffle_never_changes():
    """Runs resume by it: these numbers must stay what they are."""
    assert permuted(np.arange(8), 8, 3, 5).tolist() == [0, 6, 7, 2, 3, 5, 1, 4]
    assert permuted(np.arange(4), 1_000_000_007, 3, 5).tolist() == [43296689, 908711778, 860179779, 184964229]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    shard_tokens=st.integers(1, 60),
    sequence=st.integers(2, 33),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    ranks=st.integers(1, 5),
    per_rank=st.integers(1, 4),
    resumed_after=st.integers(0, 20),
)
def test_no_token_is_lost_or_seen_twice(
    tmp_path_factory, lengths, shard_tokens, sequence, seed, shuffle, ranks, per_rank, resumed_after
):
    documents = list(numbered_documents(lengths))
    vocabulary = sum(lengths) + 1
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory, documents, vocab_size=vocabulary, end_of_document=END, shard_tokens=shard_tokens)
    corpus = Corpus.open(directory, "checksums")
    stream = [token for document in documents for token in [*document, END]]
    assert corpus.tokens == len(stream)
    assert corpus.read(0, corpus.tokens).tolist() == stream
    assert [corpus.document(number).tolist() for number in range(corpus.documents)] == [[*d, END] for d in documents]

    rows = CorpusRows(corpus, sequence, seed, shuffle)
    step = ranks * per_rank
    steps = -(-2 * rows.per_epoch // step)  # two epochs, and whatever the last step adds
    alone = rows.batch(0, steps * step)
    together = [
        torch.cat([rows.batch(number * step + rank * per_rank, per_rank)["input_ids"] for rank in range(ranks)])
        for number in range(steps)
    ]
    assert torch.equal(torch.cat(together), alone["input_ids"])
    for epoch in range(2):
        labels = alone["labels"][epoch * rows.per_epoch : (epoch + 1) * rows.per_epoch]
        inputs = alone["input_ids"][epoch * rows.per_epoch : (epoch + 1) * rows.per_epoch]
        real = labels != IGNORE_INDEX
        assert torch.equal(inputs[real], labels[real])
        assert sorted(inputs[real].tolist()) == sorted(stream)
        assert (inputs[~real] == END).all()
    first = min(resumed_after, steps - 1)
    fresh = CorpusRows(Corpus.open(directory), sequence, seed, shuffle).batch(first * step, (steps - first) * step)
    assert torch.equal(fresh["input_ids"], alone["input_ids"][first * step :])
    assert torch.equal(fresh["labels"], alone["labels"][first * step :])


def test_epochs_are_shuffled_anew_and_unshuffled_rows_are_the_stream(corpus):
    rows = CorpusRows(corpus, 4, seed=1)
    one, two = rows.batch(0, rows.per_epoch)["input_ids"], rows.batch(rows.per_epoch, rows.per_epoch)["input_ids"]
    assert not torch.equal(one, two)
    plain = CorpusRows(corpus, 4, shuffle=False).batch(0, rows.per_epoch)["labels"].flatten()
    assert plain[plain != IGNORE_INDEX].tolist() == corpus.read(0, corpus.tokens).tolist()


def test_positions_start_again_in_every_document(corpus):
    rows = CorpusRows(corpus, 6, seed=1, document_positions=True)
    batch = rows.batch(0, rows.per_epoch)
    for tokens, positions, labels in zip(
        *(batch[name].tolist() for name in ("input_ids", "position_ids", "labels")), strict=True
    ):
        expected = 0
        for token, position, label in zip(tokens, positions, labels, strict=True):
            assert label == IGNORE_INDEX or position == expected
            expected = 0 if token == END else position + 1


def test_attention_stays_inside_documents_with_those_positions(corpus):
    """What the loader's comment promises of Hugging Face models."""
    batch = CorpusRows(corpus, 20, shuffle=False, document_positions=True).batch(0, 2)
    model = tiny_model()
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        end = int((batch["input_ids"][0] == END).nonzero()[0]) + 1
        start = end
        stop = int((batch["input_ids"][0, start:] == END).nonzero()[0]) + start + 1
        alone = model(input_ids=batch["input_ids"][:1, start:stop]).logits
    torch.testing.assert_close(packed[0, start:stop], alone[0])


def test_a_pickled_corpus_opens_its_own_maps(corpus):
    corpus.read(0, 10)
    small = pickle.dumps(corpus)
    assert len(small) < 4000
    assert pickle.loads(small).read(0, corpus.tokens).tolist() == corpus.read(0, corpus.tokens).tolist()


def test_the_dtype_follows_the_vocabulary(tmp_path):
    assert dtype_for(65536) == "uint16"
    assert dtype_for(65537) == "uint32"
    with pytest.raises(ValueError, match="does not fit any token dtype"):
        dtype_for(2**32 + 1)
    wide = write_corpus(tmp_path / "wide", [[70_000, 3]], vocab_size=70_001, end_of_document=1)
    assert wide.dtype == "uint32"
    assert Corpus.open(tmp_path / "wide", "checksums").read(0, 3).tolist() == [70_000, 3, 1]


def edit_index(corpus, **changes):
    path = corpus.directory / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_wrong_with_a_directory_is_named(corpus, tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        Corpus.open(tmp_path / "nowhere")
    shard = corpus.directory / corpus.shards[1].tokens_file
    whole = shard.read_bytes()
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    Corpus.open(corpus.directory)  # the size is right
    with pytest.raises(ValueError, match=r"00001\.tokens is damaged: its sha256"):
        Corpus.open(corpus.directory, "checksums")
    shard.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=rf"00001\.tokens has {len(whole) - 2} bytes, the index says {len(whole)}"):
        Corpus.open(corpus.directory)
    shard.unlink()
    with pytest.raises(ValueError, match=r"00001\.tokens is missing"):
        Corpus.open(corpus.directory)
    shard.write_bytes(whole)
    Corpus.open(corpus.directory, "checksums")
    ends = corpus.directory / corpus.shards[0].documents_file
    ends.write_bytes(bytes(len(ends.read_bytes())))
    with pytest.raises(ValueError, match=r"00000\.documents is damaged"):
        Corpus.open(corpus.directory, "checksums")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 65_537}, "65537 does not fit the shards' dtype uint16"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"version": 99}, "version 99"),
        ({"format": "other"}, "not the index of a corpus"),
        ({"shards": []}, "damaged"),
        ({"shards": [{"name": "00000"}]}, "damaged"),
        ({"vocab_size": "many"}, "damaged"),
        ({"end_of_document": 100}, "outside the vocabulary"),
    ],
)
def test_a_wrong_index_is_refused(corpus, changes, message):
    edit_index(corpus, **changes)
    with pytest.raises(ValueError, match=message):
        Corpus.open(corpus.directory)


def test_an_unfinished_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has not finished there"):
        Corpus.open(tmp_path)


def test_wrong_arguments_are_named(corpus):
    with pytest.raises(ValueError, match="sequence=1"):
        CorpusRows(corpus, 1)
    with pytest.raises(ValueError, match="seed must not be negative"):
        CorpusRows(corpus, 8, seed=-1)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        CorpusRows(corpus, 8).batch(-1, 2)
    with pytest.raises(ValueError, match="outside the corpus"):
        corpus.read(0, corpus.tokens + 1)
    with pytest.raises(ValueError, match="outside the corpus of 7 documents"):
        corpus.document(7)
    with pytest.raises(ValueError, match="verify must be"):
        Corpus.open(corpus.directory, "yes")
