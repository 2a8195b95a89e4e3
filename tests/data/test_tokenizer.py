"""Tokenizer files and chat templates that others wrote: what fails in them is one line."""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ladder_residual.data.documents import Document
from ladder_residual.data.encoder import Encoder
from ladder_residual.data.failures import failures_of
from ladder_residual.data.tokenizer import ChatForm, read_tokenizer, render_chat
from ladder_residual.generation.tokenizer import chat_prompt, load_tokenizer

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
DEEP = "{% if x %}" * 300 + "{% endif %}" * 300
TEMPLATES = {
    "{{ raise_exception('only\\n\x1b[31msystem') }}": r"TemplateError: only \\x1b\[31msystem",
    "{% for m in messages %}": "TemplateSyntaxError: Unexpected end of template",
    "{{ messages.__class__.__mro__ }}": "SecurityError: access to attribute '__class__'",
    "{{ nothing.at.all }}": "UndefinedError: 'nothing' is undefined",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ range(10 ** 9) }}": "OverflowError: Range too big",
    "{{ messages | nofilter }}": "No filter named 'nofilter'",
    "{% include '/etc/passwd' %}": "no loader for this environment",
    DEEP: "RecursionError",
}


@pytest.fixture
def copy(demo_dir, tmp_path):
    shutil.copytree(demo_dir, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template[:30])
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_failing_chat_template_is_one_line_that_names_its_file(copy, file, template):
    if file == "chat_template.jinja":
        (copy / file).write_text(template)
    else:
        config = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps({**config, "chat_template": template}))
    tokenizer = load_tokenizer(copy)
    for use in (
        lambda: chat_prompt(tokenizer, CHAT[:1]),
        lambda: ChatForm.of(tokenizer),
        lambda: Encoder(tokenizer, 512).chunk(Document(messages=CHAT), "here"),
    ):
        with pytest.raises(ValueError, match=TEMPLATES[template]) as caught:
            use()
        assert str(copy / file) in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_a_chat_template_that_works_is_rendered(copy):
    (copy / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert render_chat(read_tokenizer(copy), CHAT, prompt=False) == "<user>hello<assistant>yes"


class PanicException(BaseException):
    """As the Rust library under the tokenizers raises it."""


@pytest.mark.parametrize("error", [Exception("plain"), PanicException("index out of bounds\nat x"), KeyError("x")])
def test_whatever_the_libraries_raise_is_a_value_error(error):
    with pytest.raises(ValueError, match=f"^here: {type(error).__name__}: ") as caught, failures_of("here"):
        raise error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_what_is_not_the_tokenizers_fault_passes(error):
    with pytest.raises(type(error)), failures_of("here"):
        raise error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_a_tokenizer_file_is_used_or_refused_in_one_line(copy, demo_dir, data):
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    document = json.loads((demo_dir / name).read_text())
    table = document
    while isinstance(table, dict) and table:
        key = data.draw(st.sampled_from(sorted(table)))
        if not isinstance(table[key], dict) or data.draw(st.booleans()):
            table[key] = data.draw(JSON)
            break
        table = table[key]
    (copy / name).write_text(json.dumps(document))
    try:
        tokenizer = load_tokenizer(copy)
        with failures_of("encode"):
            tokenizer(["Once upon a time", "a"], padding=True)
        ChatForm.of(tokenizer)
    except ValueError as error:
        assert str(error)
    finally:
        shutil.copy(demo_dir / name, copy / name)
