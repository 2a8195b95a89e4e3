"""A tokenizer with a chat template, and a chat."""

import pytest

from ladder_residual.data.encoder import Encoder
from ladder_residual.data.tokenizer import read_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def encoder(demo_dir):
    tokenizer = read_tokenizer(demo_dir)
    tokenizer.chat_template = TEMPLATE
    return Encoder(tokenizer, 512)


@pytest.fixture
def chat():
    return [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "A dog."},
    ]
