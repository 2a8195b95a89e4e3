"""The demo model and its tokenizer, loaded once a process: they are not what is broken."""

from __future__ import annotations

from functools import cache
from typing import Any

CHAT = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@cache
def demo_model() -> tuple[Any, Any]:
    """With a chat template, as instruction-tuned models have one."""
    from ladder_residual.bench.demo import demo_directory
    from ladder_residual.generation.tokenizer import load_tokenizer
    from ladder_residual.models.loading import load_model

    tokenizer = load_tokenizer(demo_directory())
    tokenizer.chat_template = CHAT
    return load_model(demo_directory()), tokenizer
