"""Files of prompts."""

import pytest

from ladder_residual.generation.prompts import as_text, parse_prompts
from ladder_residual.generation.tokenizer import load_tokenizer


def test_prompt_files(demo_dir, tmp_path):
    tokenizer = load_tokenizer(demo_dir)
    good = tmp_path / "prompts.jsonl"
    good.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert as_text(parse_prompts(good), tokenizer) == (["a", "b"], False)
    good.write_text('{"prompt": "a\u2028b"}\n')
    assert as_text(parse_prompts(good), tokenizer) == (["a\u2028b"], False)
    for content, named in [
        ("{\n", "line 1: not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}\n', 'line 2: expected an object with "prompt"'),
        ("[1]\n", "line 1: expected"),
        ("", "holds no prompt"),
        ('{"messages": []}\n', "no chat template"),
        ('{"messages": ["x"]}\n', "line 1: every message needs"),
    ]:
        bad = tmp_path / "bad.jsonl"
        bad.write_text(content)
        with pytest.raises(ValueError, match=named):
            as_text(parse_prompts(bad), tokenizer)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        parse_prompts(tmp_path / "binary.txt")


def test_texts_and_conversations_are_not_mixed(demo_dir):
    with pytest.raises(ValueError, match="one kind at a time"):
        as_text(["a", [{"role": "user", "content": "b"}]], load_tokenizer(demo_dir))
