"""Text to shards: every kind of source, the same bytes for any number of workers and after any interruption, clear refusals."""

import gzip
import json
import lzma
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ladder_residual.cli.main import app
from ladder_residual.data import corpus_writer, sources
from ladder_residual.data.corpus import Corpus
from ladder_residual.data.prepare import PrepareSettings, prepare
from ladder_residual.data.sources import SourceOptions
from ladder_residual.data.tokenizer import read_tokenizer, tokenizer_digest

STORIES = ["Once upon a time, there was a cat.", "The dog ran.\nIt was fast.", "A bird — über alles."]


@pytest.fixture(scope="module")
def tokenizer():
    from ladder_residual.bench.demo import demo_directory

    return read_tokenizer(demo_directory())


@pytest.fixture
def made(tmp_path, demo_dir):
    """Prepare in this process, into a new directory each time."""
    count = iter(range(1000))

    def run(*names, out=None, workers=1, overwrite=False, source_options=None, **settings):
        settings = PrepareSettings(options=SourceOptions(**source_options or {}), **settings)
        out = out or tmp_path / f"out{next(count)}"
        return prepare([str(name) for name in names], out, str(demo_dir), settings, workers=workers, overwrite=overwrite)

    return run


def expected(tokenizer, *texts):
    """As transformers tokenises each, then the end of the document."""
    return [[*tokenizer(text)["input_ids"], 2] for text in texts]


def documents(corpus):
    return [corpus.document(number).tolist() for number in range(corpus.documents)]


def files(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_text_files_split_at_the_separator_line(tmp_path, tokenizer, made):
    text = "\n<|eot|>\n".join(STORIES) + "\n<|eot|>\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(text.encode()))
    for name in ("a.txt", "b.txt.gz", "c.txt.xz"):
        corpus = made(tmp_path / name, source_options={"document_separator": "<|eot|>"})
        assert documents(corpus) == expected(tokenizer, *STORIES)
    whole = made(tmp_path / "a.txt")
    assert documents(whole) == expected(tokenizer, text)
    both = made(tmp_path / "a.txt", tmp_path / "c.txt.xz", source_options={"document_separator": "<|eot|>"}, limit=4)
    assert documents(both) == expected(tokenizer, *STORIES, STORIES[0])
    assert both.index()["prepared"]["sources"][0]["bytes"] == len(text.encode())


def test_json_lines_text_fields_and_ids(tmp_path, tokenizer, made):
    digest = tokenizer_digest(tokenizer)
    rows = [
        {"text": STORIES[0]},
        {"text": ""},
        {"ids": [5, 6, 7], "text": "other", "tokenizer": digest},
        {"ids": [5, 2]},
        {"text": STORIES[2], "extra": 1},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert documents(made(path)) == [
        *expected(tokenizer, STORIES[0]),
        [5, 6, 7, 2],
        [5, 2],
        *expected(tokenizer, STORIES[2]),
    ]
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"question": "Who?", "answer": "Me."}])
    assert documents(made(pairs, text_fields=("question", "answer"))) == expected(tokenizer, "Who?\nMe.")


def test_chats_go_through_the_template(tmp_path, demo_dir, tokenizer):
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((Path(demo_dir) / name).read_bytes())
    (directory / "chat_template.jinja").write_text("{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}")
    chat = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": chat}])
    corpus = prepare([str(path)], tmp_path / "out", str(directory), PrepareSettings())
    text = "<s>user: Hi.<s>assistant: Ho."
    assert documents(corpus) == [[*tokenizer(text, add_special_tokens=False)["input_ids"], 2]]


def test_parquet_and_a_dataset_of_the_hub(tmp_path, tokenizer, made):
    """The hub's loader, streaming, on a local folder: what differs online is where the files come from."""
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "dataset"
    folder.mkdir()
    parquet.write_table(pyarrow.table({"text": STORIES}), folder / "train-00000-of-00001.parquet")
    assert documents(made(folder / "train-00000-of-00001.parquet")) == expected(tokenizer, *STORIES)
    assert documents(made(folder)) == expected(tokenizer, *STORIES)  # a directory stands for its files
    assert documents(made(f"hub:{folder}")) == expected(tokenizer, *STORIES)
    assert documents(made(f"hub:{folder}", limit=2)) == expected(tokenizer, *STORIES[:2])
    lines = tmp_path / "lines"
    lines.mkdir()
    write_rows(lines / "train.jsonl", [{"text": story} for story in STORIES])
    write_rows(lines / "test.jsonl", [{"text": "Other."}])
    assert documents(made(f"hub:{lines}")) == expected(tokenizer, *STORIES)
    assert documents(made(f"hub:{lines}", source_options={"split": "test"})) == expected(tokenizer, "Other.")
    with pytest.raises(ValueError, match="is no file, and it cannot be read from the hub"):
        made(f"hub:{lines}", source_options={"split": "nosplit"})


def test_a_tokenizer_file_alone_is_enough(tmp_path, demo_dir, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text(STORIES[0])
    corpus = prepare([str(path)], tmp_path / "out", str(Path(demo_dir) / "tokenizer.json"), PrepareSettings())
    assert documents(corpus) == expected(tokenizer, STORIES[0])
    other = prepare([str(path)], tmp_path / "two", str(demo_dir), PrepareSettings(end_of_document="<s>"))
    assert other.end_of_document == 1
    with pytest.raises(ValueError, match="no token '<none>'"):
        prepare([str(path)], tmp_path / "three", str(demo_dir), PrepareSettings(end_of_document="<none>"))


def test_a_limit_stored_in_the_tokenizer_cuts_nothing(tmp_path, demo_dir):
    stored = json.loads((Path(demo_dir) / "tokenizer.json").read_text(encoding="utf-8"))
    stored["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    (tmp_path / "a.txt").write_text(STORIES[0])
    corpus = prepare([str(tmp_path / "a.txt")], tmp_path / "out", str(tmp_path / "tokenizer.json"), PrepareSettings())
    assert corpus.tokens > 10


def test_long_documents_are_cut_at_line_ends(tmp_path, tokenizer, made, monkeypatch):
    monkeypatch.setattr(sources, "MAX_CHUNK", 40)
    monkeypatch.setattr("ladder_residual.data.prepare.MAX_CHUNK", 40)
    lines = [f"Line number {number} of it.\n" for number in range(20)] + ["word " * 30]
    text = "".join(lines)
    (tmp_path / "long.txt").write_text(text)
    rows = write_rows(tmp_path / "long.jsonl", [{"text": text}])
    for source in (tmp_path / "long.txt", rows):
        corpus = made(source, source)
        assert corpus.documents == 2
        one = corpus.document(0).tolist()
        assert one.count(1) == 1  # the tokenizer's first token stands at the start alone
        assert one[0] == 1
        # Whatever the tokenizer makes of the borders, no character is lost.
        assert tokenizer.decode(one[1:-1]).replace(" ", "") == text.replace(" ", "")


def large_source(tmp_path, rows=400):
    stories = [
        f"Once upon a time there was number {number}. " + "It was a big red ball. " * (number % 17) for number in range(rows)
    ]
    stories[3] = ""  # counted, not written
    return write_rows(tmp_path / "large.jsonl", [{"text": story} for story in stories])


def test_neither_workers_nor_shards_change_the_tokens(tmp_path, made, monkeypatch):
    monkeypatch.setattr("ladder_residual.data.prepare._BATCH_CHARACTERS", 2000)
    source = large_source(tmp_path)
    one = made(source, shard_tokens=3000)
    many = made(source, shard_tokens=3000, workers=3)
    assert files(one.directory) == files(many.directory)
    assert len(one.shards) > 5
    assert all(3000 <= shard.tokens < 3400 for shard in one.shards[:-1])
    whole = made(source)
    assert len(whole.shards) == 1
    assert np.array_equal(one.read(0, one.tokens), whole.read(0, whole.tokens))
    assert np.array_equal(one.document_ends, whole.document_ends)


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("step", [1, 2, 3, 4, 8, 9, 10, 21])
def test_an_interruption_at_any_rename_changes_nothing(tmp_path, made, monkeypatch, step):
    """Every file gets its name by a rename: stop before the ``step``-th, go on, compare."""
    source = large_source(tmp_path, 200)
    straight = made(source, shard_tokens=2000)
    renames = iter(range(1, 1000))
    real = os.replace

    def replace(*paths):
        if next(renames) == step:
            raise Interrupted
        real(*paths)

    out = tmp_path / "resumed"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Interrupted):
            made(source, out=out, shard_tokens=2000)
    assert not (out / "index.json").exists()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    listed = json.loads((out / "progress.json").read_text())["shards"] if (out / "progress.json").exists() else []
    made(source, out=out, shard_tokens=2000)
    assert files(out) == files(straight.directory)
    kept = {f"{shard['name']}.tokens" for shard in listed}
    assert all((out / name).stat().st_mtime_ns == before[name] for name in kept)  # not written again


def command(*words):
    return [sys.executable, "-m", "ladder_residual", "data", *map(str, words)]


def test_killed_and_restarted_gives_the_same_bytes(tmp_path, demo_dir, made):
    """SIGKILL of the real command with two workers, as soon as a shard is there; no worker outlives it."""
    source = large_source(tmp_path, 6000)
    out = tmp_path / "killed"
    words = command("prepare", source, out, "--tokenizer", demo_dir, "--shard-tokens", 4000, "--workers", 2)
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out / "progress.json").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    before = set(out.glob("*.tokens"))
    with pytest.raises(ValueError, match=f"killed is in use by process {process.pid} on "):
        made(source, out=out, overwrite=True)
    assert before <= set(out.glob("*.tokens"))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "index.json").exists()
    finished = json.loads((out / "progress.json").read_text())["shards"]
    assert finished
    assert len(children) >= 2
    while any(Path(f"/proc/{child}/exe").exists() and "ladder" in _words_of(child) for child in children):
        assert time.monotonic() < deadline, "a worker outlived the reader"
        time.sleep(0.05)
    with pytest.raises(ValueError, match="has not finished there"):
        Corpus.open(out)
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    made(source, out=out, shard_tokens=4000)
    assert files(out) == files(made(source, shard_tokens=4000).directory)
    assert all((out / f"{shard['name']}.tokens").stat().st_mtime_ns == kept[f"{shard['name']}.tokens"] for shard in finished)


def test_ctrl_c_says_what_is_kept(tmp_path, demo_dir, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ladder_residual.data.prepare.prepare", interrupted)
    (tmp_path / "a.txt").write_text("once")
    result = CliRunner().invoke(
        app, ["data", "prepare", str(tmp_path / "a.txt"), str(tmp_path / "out"), "--tokenizer", str(demo_dir)]
    )
    assert result.exit_code == 130
    assert "finished shards are kept in" in result.stderr


def _words_of(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode()
    except OSError:
        return ""


def test_the_same_command_again_changes_nothing_and_another_is_refused(tmp_path, made):
    source = large_source(tmp_path, 50)
    out = tmp_path / "out"
    first = files(made(source, out=out).directory)
    (out / "notes").write_text("mine")
    made(source, out=out)
    with pytest.raises(ValueError, match="already holds a corpus; choose another directory or use --overwrite"):
        made(source, out=out, limit=7)
    assert made(source, out=out, limit=7, overwrite=True).documents == 6  # one of the seven is empty
    made(source, out=out, overwrite=True)
    assert {name: data for name, data in files(out).items() if name != "notes"} == first
    assert (out / "notes").read_text() == "mine"


def test_an_unfinished_run_of_other_settings_is_not_continued(tmp_path, made, monkeypatch):
    source = large_source(tmp_path, 200)
    out = tmp_path / "out"

    def unfinished(**settings):
        with monkeypatch.context() as patch:
            patch.setattr(corpus_writer.CorpusWriter, "finish", lambda self: (_ for _ in ()).throw(Interrupted()))
            with pytest.raises(Interrupted):
                made(source, out=out, shard_tokens=2000, **settings)

    unfinished()
    with pytest.raises(ValueError, match="unfinished corpus of other settings .*limit"):
        made(source, out=out, shard_tokens=2000, limit=150)
    rows = source.read_text().replace("red", "bad")
    source.write_text(rows)  # the same size
    with pytest.raises(ValueError, match="unfinished corpus of other settings .*sources"):
        made(source, out=out, shard_tokens=2000)
    unfinished(overwrite=True)
    shard = out / "00001.tokens"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x05\x00")
    with pytest.raises(ValueError, match=r"00001\.tokens is damaged"):
        made(source, out=out, shard_tokens=2000)
    progress = json.loads((out / "progress.json").read_text())
    shards = [progress["shards"][0] | {"name": "../elsewhere"}, *progress["shards"][1:]]
    for odd in ({"settings": [1]}, {"consumed": "3"}, {"shards": shards}, {"shards": [{}]}, {"shards": 7}):
        (out / "progress.json").write_text(json.dumps(progress | odd))
        with pytest.raises(ValueError, match=r"cannot read .*progress\.json: .*; use --overwrite"):
            made(source, out=out, shard_tokens=2000)


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_runs_cannot_write_the_same_directory(tmp_path, made, overwrite):
    source, out = large_source(tmp_path, 20), tmp_path / "out"
    with corpus_writer.CorpusWriter(out, 10, 0, shard_tokens=1) as first:
        first.add([1, 2])
        before = files(out)
        assert "00000.tokens" in before
        with pytest.raises(ValueError, match=f"out is in use by process {os.getpid()} on "):
            made(source, out=out, overwrite=overwrite)
        assert files(out) == before
        assert first.finish().tokens == 3


def test_a_wrong_option_drops_nothing(tmp_path, made):
    source, out = large_source(tmp_path, 20), tmp_path / "out"
    before = files(made(source, out=out).directory)
    with pytest.raises(ValueError, match="no such token"):
        made(source, out=out, overwrite=True, end_of_document="no such token")
    assert files(out) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"text": "a"}\n\n{"text": \n', r"bad\.jsonl, line 3: not JSON"),
        ("bad.jsonl", b'{"text": "a"}\n[1]\n', r"bad\.jsonl, line 2: expected an object, got a list of 3 characters$"),
        (
            "bad.jsonl",
            b'{"text": "a"}\n{"text": 7}\n',
            r"bad\.jsonl, line 2: text must be text; got a int of 1 characters$",
        ),
        ("bad.jsonl", b'{"body": "a"}\n', r"line 1: has none of text, .*its fields are body; .*--text-field"),
        ("bad.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n', "the tokenizer has no chat template"),
        ("bad.jsonl", b'{"ids": [1, 512]}\n', r"bad\.jsonl, line 1: token 512 is outside .* vocabulary of 512"),
        ("bad.jsonl", b'{"ids": [1, -3]}\n', r"bad\.jsonl, line 1: token -3 is outside"),
        ("bad.jsonl", b'{"ids": [1, 2.5]}\n', "line 1: ids must be a list of whole numbers"),
        ("bad.jsonl", b'{"ids": [1], "tokenizer": "other"}\n', "line 1: its ids are of another tokenizer"),
        ("bad.jsonl", b"", "no document with any text"),
        ("bad.txt", b"", "no document with any text"),
        ("bad.txt", b"caf\xe9", r"bad\.txt is not UTF-8 text"),
        ("bad.txt.xz", lzma.compress(b"some text" * 1000)[:-20], r"bad\.txt\.xz is damaged"),
        ("bad.txt.gz", gzip.compress(b"some text" * 1000, mtime=0)[:-20], r"bad\.txt\.gz is damaged"),
        ("bad.txt.gz", b"no gzip at all", r"bad\.txt\.gz is damaged"),
        ("bad.parquet", b"PAR1 nonsense", r"bad\.parquet is damaged"),
        ("bad.bin", b"x", "cannot tell what kind of file"),
    ],
)
def test_bad_sources_are_named(tmp_path, made, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        made(tmp_path / name, out=tmp_path / "out")
    left = list((tmp_path / "out").iterdir()) if (tmp_path / "out").exists() else []
    assert left == []


def test_other_wrong_words_are_named(tmp_path, demo_dir, made):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there is no file or directory"):
        made(tmp_path / "b.txt")
    with pytest.raises(ValueError, match="holds no .txt"):
        made(tmp_path / "empty")
    with pytest.raises(ValueError, match="--workers must be at least 1"):
        made(tmp_path / "a.txt", workers=0)
    with pytest.raises(ValueError, match="--shard-tokens must be at least 1"):
        made(tmp_path / "a.txt", shard_tokens=0)
    with pytest.raises(ValueError, match="--limit must be at least 1"):
        made(tmp_path / "a.txt", limit=0)
    with pytest.raises(ValueError, match="no checkpoint directory"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", str(tmp_path / "x" / "y"), PrepareSettings())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer transformers can load"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", str(tmp_path / "tokenizer.json"), PrepareSettings())


def test_where_nothing_can_be_written(tmp_path, made):
    source = large_source(tmp_path, 20)
    with pytest.raises(ValueError, match="cannot write /proc/ladder-corpus"):
        made(source, out=Path("/proc/ladder-corpus"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write .*file.*: "):
        made(source, out=tmp_path / "file" / "out")


def test_a_full_disk_leaves_finished_shards_and_no_half_file(tmp_path, made):
    """The system's limit on a file's size stands for the disk: the write fails in the middle of a shard."""
    source = large_source(tmp_path, 200)
    out = tmp_path / "out"
    straight = made(source, shard_tokens=2000)
    sizes = [path.stat().st_size for path in sorted(straight.directory.glob("*.tokens"))]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))  # smaller than any shard
    try:
        with pytest.raises(ValueError, match=r"cannot write .*00000\.tokens: File too large; finished shards are kept"):
            made(source, out=out, shard_tokens=2000)
        assert list(out.iterdir()) == []
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes[:2]), before[1]))
        with pytest.raises(ValueError, match="cannot write"):
            made(source, out=out, shard_tokens=max(sizes[:2]))  # tokens of two bytes: twice the limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(out.glob("*.partial")) == []
    assert made(source, out=out, shard_tokens=2000, overwrite=True).index()["shards"] == straight.index()["shards"]


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 48 KiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_really_full(small_disk, tmp_path, made):
    source = large_source(tmp_path, 400)
    straight = made(source, shard_tokens=4000)
    with pytest.raises(ValueError, match="No space left on device; finished shards are kept"):
        made(source, out=small_disk / "out", shard_tokens=4000)
    kept = json.loads((small_disk / "out" / "progress.json").read_text())["shards"]
    assert len(kept) >= 2
    assert list((small_disk / "out").glob("*.partial")) == []
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    assert files(made(source, out=small_disk / "out", shard_tokens=4000).directory) == files(straight.directory)


def test_inspect_says_what_is_there(tmp_path, made):
    corpus = made(large_source(tmp_path, 20))
    done = CliRunner().invoke(app, ["data", "inspect", str(corpus.directory), "--verify", "--document", "1"])
    assert done.exit_code == 0, done.exception
    assert f"{corpus.tokens:,}" in done.stdout
    assert "number 1" in done.stdout
    assert "checksums right" in done.stdout
    as_json = CliRunner().invoke(app, ["data", "inspect", str(corpus.directory), "--json"])
    assert json.loads(as_json.stdout)["tokens"] == corpus.tokens
    (corpus.directory / "00000.tokens").write_bytes(bytes(corpus.tokens * 2))
    done = CliRunner().invoke(app, ["data", "inspect", str(corpus.directory), "--verify"])
    assert "00000.tokens is damaged" in str(done.exception)
