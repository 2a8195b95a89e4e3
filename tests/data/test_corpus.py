"""Damaged corpora: every byte and every field is checked before it is used."""

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.corpora import write_corpus
from ladder_residual.data.corpus import Corpus
from ladder_residual.data.corpus_rows import CorpusRows

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def corpus(tmp_path):
    documents = [np.arange(1, length) for length in (5, 9, 3)]
    write_corpus(tmp_path / "corpus", documents, vocab_size=16, end_of_document=0, shard_tokens=8)
    return tmp_path / "corpus"


def use(directory):
    """All that commands do with one."""
    found = Corpus.open(directory)
    rows = CorpusRows(found, sequence=4, document_positions=True)
    assert len(rows.batch(0, rows.per_epoch)["input_ids"]) == rows.per_epoch
    assert [found.document(number)[-1] for number in range(found.documents)]
    found.tokenizer.get("digest")
    json.dumps(found.index())


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_the_index_is_used_or_refused(corpus, data):
    whole = (corpus / "index.json").read_text()
    table = index = json.loads(whole)
    if data.draw(st.booleans()):
        table = index["shards"][0]
    key = data.draw(st.sampled_from(sorted(table)))
    if data.draw(st.integers(0, 5)):
        table[key] = data.draw(JSON)
    else:
        del table[key]
    (corpus / "index.json").write_text(json.dumps(index))
    try:
        use(corpus)
    except ValueError as error:
        assert type(error) is ValueError
        assert str(corpus) in str(error)
    finally:
        (corpus / "index.json").write_text(whole)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_of_a_shard_is_read_or_refused(corpus, data):
    file = data.draw(st.sampled_from(sorted(path for path in corpus.iterdir() if path.suffix in (".tokens", ".documents"))))
    whole = file.read_bytes()
    content = bytearray(whole)
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        use(corpus)
    except ValueError as error:
        assert type(error) is ValueError
        assert str(file) in str(error)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"format": "ladder-corpus", "version": 1}', "\x00", "nan"])
def test_an_index_that_is_none_is_refused_by_name(corpus, text):
    (corpus / "index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json"):
        Corpus.open(corpus)


def test_a_pipe_in_the_place_of_the_index_is_not_waited_for(corpus):
    (corpus / "index.json").unlink()
    os.mkfifo(corpus / "index.json")
    with pytest.raises(ValueError, match=r"index\.json is not a file"):
        Corpus.open(corpus)
