"""What the fields of a record mean."""

import pytest

from ladder_residual.data.documents import Document, document_of


def test_every_shape_of_document_is_read(chat):
    def messages(row):
        return document_of(row, "here").messages

    assert document_of({"text": "Once upon a time"}, "here") == Document(text="Once upon a time")
    assert document_of({"ids": [5, 6, 7]}, "here").ids == [5, 6, 7]
    assert messages({"messages": chat}) == chat
    two = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert messages({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}) == two
    for asked, answered in (
        ("prompt", "completion"),
        ("prompt", "response"),
        ("question", "answer"),
        ("instruction", "output"),
    ):
        assert messages({asked: "Hi", answered: "Ho"}) == two
    assert messages({"instruction": "Add", "input": "1 and 2", "output": "3"})[0]["content"] == "Add\n\n1 and 2"


def test_named_text_fields_win(chat):
    row = {"question": "Who?", "answer": "Me.", "text": "else", "messages": chat}
    assert document_of(row, "here", ("question", "answer")) == Document(text="Who?\nMe.")
    assert document_of(row, "here", ("text",)) == Document(text="else")
    assert document_of(row, "here").messages == chat


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "no"}, "here: has none of text"),
        ({"text": 7}, "here: text must be text"),
        ({"text": "  "}, "here: text must be text, not empty"),
        ({"ids": []}, "here: ids must be"),
        ({"ids": [1, "2"]}, "here: ids must be"),
        ({"ids": [1, True]}, "here: ids must be"),
        ({"messages": [{"role": "cat", "content": "?"}]}, "here: unknown role 'cat'"),
        ({"messages": [{"role": ["cat"], "content": "?"}]}, "here: unknown role"),
        ({"messages": [{"role": "user", "content": None}]}, "here: content must be text"),
        ({"messages": ["hello"]}, "here: a message is an object with role and content, got a str of 5 characters"),
    ],
)
def test_a_malformed_record_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        document_of(row, "here")
