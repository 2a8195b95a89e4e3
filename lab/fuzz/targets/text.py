"""Text: tokenizers, chat templates, prompts, files of prompts, sources of documents, and prepared corpora."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from lab.fuzz.box import Box
from lab.fuzz.judge import require
from lab.fuzz.mutate import broken_json, hostile_text, hostile_value, json_bytes, mutate_bytes
from lab.fuzz.targets.demo import CHAT, demo_model

STORY = ["Once", "upon", "a", "time", "there", "was", "<s>", "</s>", "<unk>", "<|im_start|>system", "<|im_end|>", "[INST]"]
ENDS = "<|endoftext|>"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
OPEN: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def tokenizer(box: Box, chance: Random) -> None:
    from tokenizers import Tokenizer

    from ladder_residual.generation.tokenizer import load_tokenizer, tokenize

    name = chance.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
    written = broken_json(box.json(name), chance, ["auto_map", "chat_template", "model_max_length"])
    source = box.fresh(**{name.replace(".", "__"): written})
    found = tokenize(load_tokenizer(source), ["Once upon a time", "a"], padding=True)
    text = "Once upon a time"
    plain = Tokenizer.from_file(str(source / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    kept = [token for token, seen in zip(found["input_ids"][0], found["attention_mask"][0], strict=True) if seen]
    require(set(plain) <= set(kept) or name == "tokenizer_config.json", "the tokens are not those of tokenizer.json")


TEMPLATES = [
    CHAT,
    "{{ raise_exception('no system prompt') }}",
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('x') }}{% endif %}{{ messages[-1].content }}",
    "{{ messages | tojson }}{{ bos_token }}{{ strftime_now('%Y') }}",
    "{% for m in messages %}{{ m.content.upper() }}{% if loop.index0 > 3 %}{% break %}{% endif %}{% endfor %}",
]
BAD = ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}", "{{ 1/0 }}", "{{ x.y.z }}", "{%", "{{"]
BAD += ["{{ cycler.__init__.__globals__.os.popen('id').read() }}", "{{ self._TemplateReference__context }}", "{% import os %}"]
BAD += ["{{ messages[99] }}", "{% for %}", "{{ 'a' * 99 }}", "{{ namespace.__init__ }}", "{{ undefined_function() }}"]
BAD += ["{% generation %}x{% endgeneration %}", "\x1b[2J{{ 'a' | nope }}"]


def chat_template(box: Box, chance: Random) -> None:
    """Templates that raise, do not parse, or reach for what the sandbox forbids; in every place a checkpoint may keep them."""
    from ladder_residual.generation.tokenizer import chat_prompt, load_tokenizer

    template = chance.choice(TEMPLATES)
    if chance.random() < 0.4:
        place = chance.randrange(len(template) + 1)
        template = template[:place] + chance.choice(BAD) + template[place:]
    if chance.random() < 0.3:
        template = mutate_bytes(template.encode(), chance)[:10_000].decode("utf-8", "replace")
    where, named = chance.randrange(4), [{"name": "default", "template": template}]
    value: Any = template if where < 3 else chance.choice([named, {"default": template}, hostile_value(chance)])
    if where == 0:
        source = box.fresh(chat_template__jinja=template.encode())
    else:
        source = box.fresh(tokenizer_config__json=json_bytes(box.json("tokenizer_config.json") | {"chat_template": value}))
    messages = [
        {"role": chance.choice(["user", "system", "assistant", "tool"]), "content": hostile_text(chance, STORY)[:2000]}
        for _ in range(chance.choice([1, 2, 7]))
    ]
    text = chat_prompt(load_tokenizer(source), messages)
    if value in (CHAT, named) and template == CHAT:
        require(
            text == "".join(f"<|{m['role']}|>{m['content']}</s>" for m in messages) + "<|assistant|>",
            "the chat is not what its template says",
        )


def prompt(box: Box, chance: Random) -> None:
    """Prompts of every kind through tokenizer and model; every completion must be as long as asked, or end by a reason."""
    from ladder_residual.distributed.world import World
    from ladder_residual.generation.completion import complete
    from ladder_residual.generation.sampling import Sampling

    model, words = demo_model()
    prompts = [hostile_text(chance, STORY) for _ in range(chance.choice([1, 1, 3]))]
    options: dict[str, Any] = {"max_new_tokens": chance.choice([1, 2, 3]), "temperature": chance.choice([0, 0.7, 1e-3])}
    if chance.random() < 0.2:
        options["stop"] = (hostile_text(chance, STORY)[:50],)
    made = complete(model, words, prompts, Sampling(seed=1, **options), World())
    require(len(made) == len(prompts), f"{len(made)} completions of {len(prompts)} prompts")


def jsonl(box: Box, chance: Random) -> None:
    """Files of prompts: JSON lines and plain text."""
    from ladder_residual.generation.prompts import as_text, parse_prompts
    from ladder_residual.generation.tokenizer import check_text

    box.empty()
    rows: list[Any] = []
    for _ in range(chance.choice([1, 2, 5, 50])):
        text = hostile_text(chance, STORY)
        chat = {"messages": [{"role": chance.choice(["user", "system", "tool", ""]), "content": text}]}
        rows.append(chance.choice([{"prompt": text}, {"prompt": text}, chat, hostile_value(chance)]))
    content = b"\n".join(json_bytes(row) for row in rows)
    if chance.random() < 0.4:
        content = mutate_bytes(content, chance)
    path = box.path / chance.choice(["prompts.jsonl", "prompts.jsonl", "prompts.txt"])
    path.write_bytes(content)
    prompts, chats = as_text(parse_prompts(path), demo_model()[1])
    check_text(prompts)
    lines = [line for line in content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip()]
    require(len(prompts) == len(lines), f"{len(prompts)} prompts of {len(lines)} lines")
    if path.suffix == ".jsonl" and not chats:
        require(prompts == [json.loads(line)["prompt"] for line in lines], "the prompts are not those of the file")


def source(box: Box, chance: Random) -> None:
    """Documents of text, JSON lines and parquet, compressed or not, damaged; read as records, and tokenised into a corpus now and then."""
    from ladder_residual.data.documents import document_of
    from ladder_residual.data.sources import SourceOptions, find_sources

    box.empty()
    kind = chance.choice([".txt", ".jsonl", ".jsonl", ".parquet"])
    packed = chance.choice(sorted(COMPRESS)) if kind != ".parquet" else ""
    texts = [hostile_text(chance, STORY)[:3000].encode("utf-8", "replace").decode() for _ in range(chance.choice([1, 3, 20]))]
    if kind == ".txt":
        content = f"\n{ENDS}\n".join(texts).encode()
    elif kind == ".jsonl":
        content = b"\n".join(json_bytes(row_of(text, chance)) for text in texts)
    else:
        content = parquet_of(texts)
    damaged = chance.random() < 0.6
    if damaged and chance.random() < 0.4:
        content = mutate_bytes(content, chance)
    data = COMPRESS[packed](content)
    if damaged and chance.random() < 0.7:
        data = mutate_bytes(data, chance)
    path = box.path / f"text{kind}{packed}"
    path.write_bytes(data)
    (found,) = find_sources([str(path)], SourceOptions(ENDS))
    records = list(found.records())
    documents = [document_of(record.row, record.place, ("text",)) for record in records]
    if kind == ".txt":
        with OPEN[packed](path, "rb") as file:
            text = file.read().decode("utf-8-sig")
        kept = "".join(document.text or "" for document in documents)
        expected = "".join(line for line in text.splitlines(keepends=True) if line.strip() != ENDS)
        require("".join(kept.split()) == "".join(expected.split()), "the text is not that of the file")
    elif kind == ".jsonl":
        with OPEN[packed](path, "rb") as file:
            lines = [line for line in file.read().decode("utf-8-sig").split("\n") if line.strip()]
        require(
            [record.row for record in records] == [json.loads(line) for line in lines] or "NaN" in str(lines),
            "the rows are not those of the file",
        )
    if chance.random() < 0.2:
        prepared(box, path)


def row_of(text: str, chance: Random) -> Any:
    pair = {"prompt": text, "completion": "yes"}
    chat = {"messages": [{"role": chance.choice(["user", "assistant", "x"]), "content": text}]}
    ids = {"ids": chance.choice([[1, 2, 3], [10**12], [-1], [1.5], [2**63], []])}
    return chance.choice(
        [
            {"text": text},
            {"text": text},
            {"text": text},
            pair,
            chat,
            ids,
            {"text": hostile_value(chance)},
            hostile_value(chance),
        ]
    )


def parquet_of(texts: list[str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink)
    return sink.getvalue()


def prepared(box: Box, path: Path) -> None:
    """`ladder data prepare` of one file: the corpus must hold the tokens of its documents, each with its end."""
    from ladder_residual.bench.demo import demo_directory
    from ladder_residual.data.corpus import Corpus
    from ladder_residual.data.prepare import PrepareSettings, prepare
    from ladder_residual.data.sources import SourceOptions

    settings = PrepareSettings(shard_tokens=200, options=SourceOptions(ENDS))
    corpus = prepare([str(path)], box.path / "corpus", str(demo_directory()), settings)
    again = Corpus.open(box.path / "corpus", "checksums")
    require(again.tokens == corpus.tokens and again.documents == corpus.documents, "the corpus on disk is another one")
    tokens = again.read(0, again.tokens)
    require(int(tokens.max()) < again.vocab_size, "a token is outside the vocabulary")
    require(bool((tokens[again.document_ends - 1] == again.end_of_document).all()), "a document has no end")


def corpus(box: Box, chance: Random) -> None:
    """A prepared corpus with a broken index, shards that were cut or changed, document ends that lie."""
    from ladder_residual.data.corpus import Corpus
    from ladder_residual.data.corpus_rows import CorpusRows

    good = good_corpus(box)
    box.empty()
    directory = box.path / "corpus"
    shutil.copytree(good, directory)
    victim = chance.choice(["index.json", "index.json", "00000.tokens", "00001.documents", "00000.documents", "00001.tokens"])
    content = (directory / victim).read_bytes()
    if victim == "index.json":
        written = broken_json(json.loads(content), chance, ["format", "version", "shards", "dtype"])
    else:
        written = mutate_bytes(content, chance)
        if chance.random() < 0.5 and content:  # of the same length: only checksums, or sense, tell
            flipped = bytearray(content)
            for _ in range(chance.choice([1, 3])):
                flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
            written = bytes(flipped)
    (directory / victim).write_bytes(written)
    verify = chance.choice(["sizes", "checksums"])
    opened = Corpus.open(directory, verify)  # type: ignore[arg-type]
    if victim != "index.json":
        require(verify == "sizes" or written == content, "a changed shard passed its checksum")
    rows = CorpusRows(opened, sequence=16, seed=1, document_positions=True)
    batch = rows.batch(0, min(rows.per_epoch, 50))
    require(
        int(batch["input_ids"].min()) >= 0 and int(batch["input_ids"].max()) < opened.vocab_size,
        "a row holds tokens outside the vocabulary",
    )
    require(int(batch["position_ids"].min()) >= 0 and int(batch["position_ids"].max()) < 16, "positions lie outside the row")
    dtype = {"uint16": "<u2", "uint32": "<u4"}[opened.dtype]
    held = np.concatenate([np.fromfile(directory / shard.tokens_file, dtype) for shard in opened.shards]).astype(np.int64)
    require(np.array_equal(opened.read(0, opened.tokens), held), "the tokens are not those of the files")
    for number in range(min(opened.documents, 20)):
        opened.document(number)


def good_corpus(box: Box) -> Path:
    directory = box.made / "corpus"
    if not directory.exists():
        from lab.corpora import write_corpus

        documents = [[1 + (7 * number + 3 * place) % 400 for place in range(20)] for number in range(20)]
        write_corpus(directory, documents, vocab_size=512, end_of_document=0, shard_tokens=200)
    return directory
