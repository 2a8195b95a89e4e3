"""Records of files and hub datasets, each with its place."""

import bz2
import gzip
import json
import lzma

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ladder_residual.data.documents import document_of
from ladder_residual.data.sources import SourceOptions, find_sources, is_hub_dataset


def read(name, **options):
    return [record for source in find_sources([str(name)], SourceOptions(**options)) for record in source.records()]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz"])
def test_documents_of_a_text_file_end_at_the_separator(tmp_path, name):
    text = b"one\ntwo\n<|endoftext|>\nthree\n<|endoftext|>\n\n"
    (tmp_path / name).write_bytes(lzma.compress(text) if name.endswith(".xz") else text)
    records = read(tmp_path / name, document_separator="<|endoftext|>")
    assert [(record.row["text"], record.place.rpartition(" ")[2]) for record in records] == [("one\ntwo", "1"), ("three", "2")]
    assert [record.row["text"] for record in read(tmp_path / name)] == [text.decode()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "fine"}\n{"text": \n', "line 2: not JSON"),
        ('{"text": "fine"}\n\n[1, 2]\n', "line 3: expected an object"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read(path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "cut.txt.xz").write_bytes(lzma.compress(b"x" * 1000)[:40])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "a.csv").write_text("a,b")
    for name, message in [
        ("cut.txt.xz", "cut short"),
        ("latin.txt", "not UTF-8"),
        ("a.csv", r"known are \.txt, .*\.jsonl"),
        ("none.txt", "no file or directory"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)


def test_hub_datasets_are_told_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_dataset("owner/Made-2.5")
    assert is_hub_dataset("owner/Made-2.5:Gen")
    assert is_hub_dataset("owner/Made-2.5@main:Gen")
    assert not is_hub_dataset("owner/made.jsonl")
    assert not is_hub_dataset("made")
    (tmp_path / "owner" / "Made-2.5").mkdir(parents=True)
    assert not is_hub_dataset("owner/Made-2.5")


def test_subsets_of_hub_datasets_are_told_apart(hub):
    """Two subsets and no default."""
    (hub / "Made-2.5").mkdir()
    for subset in ("7M", "Gen"):
        (hub / "Made-2.5" / f"{subset}.jsonl").write_text(json.dumps({"text": f"of {subset}"}) + "\n")
    front = "".join(f"- config_name: {subset}\n  data_files: {subset}.jsonl\n" for subset in ("7M", "Gen"))
    (hub / "Made-2.5" / "README.md").write_text(f"---\nconfigs:\n{front}---\n")
    for subset in ("7M", "Gen"):
        assert [record.row["text"] for record in read(f"owner/Made-2.5:{subset}")] == [f"of {subset}"]
        assert [record.row["text"] for record in read("owner/Made-2.5", subset=subset)] == [f"of {subset}"]
    with pytest.raises(ValueError, match=r"(?s)owner/Made-2.5 is no file, and it cannot be read from the hub.*Gen"):
        read("owner/Made-2.5")


ROWS = "".join(json.dumps({"text": f"line {i} " + "ab" * i}) + "\n" for i in range(40)).encode()


def parquet():
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"] * 50, "n": list(range(100))}), sink)
    return sink.getvalue().to_pybytes()


PACKED = {
    "a.jsonl.gz": gzip.compress(ROWS),
    "a.jsonl.bz2": bz2.compress(ROWS),
    "a.jsonl.xz": lzma.compress(ROWS),
    "a.txt.gz": gzip.compress(b"hello " * 99),
}


@pytest.mark.parametrize("name", [*PACKED, "a.parquet"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused_in_a_line_that_names_them(tmp_path, name, data):
    content = bytearray(PACKED.get(name) or parquet())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    (tmp_path / name).write_bytes(content)
    try:
        for record in read(tmp_path / name):
            document_of(record.row, record.place)
    except ValueError as error:
        assert type(error) is ValueError, "a library's own kind"
        assert name in str(error)


def test_a_damaged_block_of_a_gzip_file_is_named(tmp_path):
    content = bytearray(gzip.compress(ROWS))
    content[12:40] = b"\xff" * 28
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged or cut short"):
        read(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "\ud800"}, "text is no text: character 0 is half of a surrogate pair"),
        ({"ids": [1 << 70]}, "token 1180591620717411303424 is outside"),
        ({"ids": [-1]}, "token -1 is outside"),
        ({str(number): 1 for number in range(10_000)}, "its fields are 0, 1, 2, .*, 11$"),
    ],
)
def test_records_that_no_tokenizer_takes_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        document_of(row, "here")


def test_a_hub_dataset_that_breaks_off_is_named(hub):
    (hub / "broken").mkdir()
    (hub / "broken" / "train.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"owner/broken: cannot read row"):
        read("owner/broken")
