"""Documents and chats as tokens, each with its use."""

import pytest

from ladder_residual.data import sources
from ladder_residual.data.documents import Document
from ladder_residual.data.encoder import LEARN, Encoder
from ladder_residual.data.tokenizer import read_tokenizer


def test_only_answers_of_a_chat_are_learned(encoder, chat):
    chunk = encoder.chunk(Document(messages=chat), "here")
    text = encoder.tokenizer.decode([token for token, use in zip(chunk.ids, chunk.use, strict=True) if use == LEARN])
    assert all(word in text for word in ("cat", "dog"))
    assert not any(word in text for word in ("Who", "then", "[user]"))
    whole = encoder.tokenizer.decode(chunk.ids)
    assert whole.split() == TEMPLATED.split()
    everything = Encoder(encoder.tokenizer, 512, answers_only=False).chunk(Document(messages=chat), "here")
    assert set(everything.use) == {LEARN}
    assert everything.ids == chunk.ids


TEMPLATED = "[user] Who are you? [end] [assistant] A cat. [end] [user] And then? [end] [assistant] A dog. [end]"


def test_a_template_that_rewrites_its_past_is_refused(demo_dir, chat):
    tokenizer = read_tokenizer(demo_dir)
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        Encoder(tokenizer, 512).chunk(Document(messages=chat), "here")


def test_a_chat_needs_a_template_and_an_answer(demo_dir, encoder, chat):
    with pytest.raises(ValueError, match="no chat template"):
        Encoder(read_tokenizer(demo_dir), 512).chunk(Document(messages=chat), "here")
    with pytest.raises(ValueError, match="here: a chat without an answer"):
        encoder.chunk(Document(messages=chat[:1]), "here")


def test_tokens_outside_the_vocabulary_are_named(encoder):
    with pytest.raises(ValueError, match="here: token 512 is outside"):
        encoder.chunk(Document(ids=[4, 512]), "here")
    with pytest.raises(ValueError, match="made by another tokenizer"):
        encoder.chunk(Document(ids=[4], tokenizer="0" * 16), "here")


def test_a_long_text_is_one_document(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(sources, "MAX_CHUNK", 40)
    text = "".join(f"Line number {number} of it.\n" for number in range(20))
    (tmp_path / "long.txt").write_text(text)
    chunks = list(encoder.chunks(str(tmp_path / "long.txt")))
    assert len(chunks) > 5
    ids = [token for chunk in chunks for token in chunk.ids]
    assert (ids[0], ids[-1]) == (encoder.opening[0], encoder.end)
    assert (ids.count(encoder.opening[0]), ids.count(encoder.end)) == (1, 1)
    assert encoder.tokenizer.decode(ids[1:-1]).replace(" ", "") == text.replace(" ", "")
