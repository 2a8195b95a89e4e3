"""What users do wrong: one line that names the value and the fix, exit code 2, and no time spent. All of these are refused in one
process in which torch and transformers cannot be imported, so none of them waits for either, or for a rank."""

import json
import shutil
import subprocess
import sys

import pytest

from ladder_residual.models.convert import convert

RUN_ALL = """
import contextlib, io, json, os, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, NoTorch())
from ladder_residual.cli.main import main

found = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    sys.argv = ["ladder", *words]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            code = repr(error)
    found.append([code, said.getvalue()])
print(json.dumps(found))
"""

# Words of the command line, and what the line must hold: the value, and the way out.
MISTAKES = [
    ("genrate stories", "'genrate'", "Did you mean 'generate'?"),
    ("gen stories", "'gen'", "Did you mean 'generate'?"),
    ("serve stories", "'serve'", "vllm serve DIR"),
    ("finetune stories", "'finetune'", "use 'adapt'"),
    ("help", "'help'", "use --help"),
    ("generate stories --promt x", "--promt", "--prompt"),
    ("data prepar", "'prepar'", "Did you mean 'prepare'?"),
    ("convert stories", "Missing argument", "ladder convert --help"),
    ("convert stories out", "nothing to convert", "--wiring ladder, ladder:last-half ... (auto chooses), --quantize fp8 or int4, or both"),
    ("convert stories out --quantize int3", "unknown format --quantize 'int3'", "choose fp8 or int4"),
    ("convert eighths out --quantize fp8", "eighths is quantised already", "leave out --quantize"),
    ("convert eighths out --wiring auto --layers 2 --calibration prompts.txt --quantize fp8", "quantised already", "leave out"),
    ("generate stories", "give either", "--prompt TEXT or --file FILE"),
    ("generate stories -p x --file prompts.txt", "give either", "--prompt TEXT or --file FILE"),
    ("generate stories -p x --out new.jsonl", "--out takes the completions of --file", "standard output"),
    ("generate stories --file prompts.txt --out prompts.txt", "the same file (prompts.txt)", "would be overwritten"),
    ("generate stories --file prompts.txt --resume", "--resume is for --out FILE", "give one"),
    ("generate stories --file prompts.txt --out done.jsonl", "done.jsonl exists", "--resume to go on with it, --overwrite"),
    ("generate stories --file prompts.txt --out done.jsonl --resume --overwrite", "--overwrite drops it", "give one of them"),
    ("generate stories --file prompts.txt --out stories", "stories is a directory", "give a file"),
    ("generate stories --file prompts.txt --out nowhere/x.jsonl", "no directory nowhere", "make it first"),
    ("generate stories --file missing.txt", "cannot read missing.txt", "No such file"),
    ("generate stories --file latin1.txt", "latin1.txt, line 2: not UTF-8", "iconv -f latin1 -t utf-8 latin1.txt"),
    ("generate stories --file empty.txt", "empty.txt holds no prompt", "write one a line"),
    ("generate stories --file bad.jsonl", "bad.jsonl, line 1", 'expected an object with "prompt"'),
    ("generate stories -p x --tp 0", "--tp must be at least 1", "got 0"),
    ("generate stories -p x --tp 3", "tp=3 does not divide 8 query heads", "use tp in [1, 2, 4], or allow"),
    ("generate stories -p x --tp 16", "tp=16 is more than the model's 8 attention heads", "use at most 8"),
    ("generate stories -p x --tp two", "'two'", "should be a valid integer"),
    ("generate stories -p - --tp 2", "standard input, which only one process has", "use --file"),
    ("generate stories -p x --wiring laddr", "unknown wiring 'laddr'", "did you mean 'ladder'"),
    ("generate stories -p x --wiring ladder:9", "layer 9", "the model has 5 layers (0 to 4)"),
    ("generate stories -p x --wiring ladder:last-9", "last-9 asks for 9 layers", "a model that has 5"),
    ("generate stories -p x --wiring ladder:4-2", "the range 4-2 runs backwards", "write 2-4"),
    ("generate stories -p x --wiring ladder@2", "'@2'", "drop it"),
    ("generate stories -p x --wiring parallel", "standard to parallel", "train a parallel model from scratch"),
    ("generate pinned -p x --tp 4", "was made for tp=2, this run has tp=4", "run with tp=2"),
    ("generate stories -p x --device tpu", "unknown device 'tpu'", "choose from auto, cpu, cuda"),
    ("generate stories -p x --dtype int3", "unknown dtype 'int3'", "choose from auto, float32"),
    ("generate stories -p x --engine cudaa", "unknown engine 'cudaa'", "did you mean 'cuda'"),
    ("generate stories -p x --schedule three", "unknown schedule 'three'", "choose from auto, serial, two_stream"),
    ("generate stories -p x --reducer mpi", "unknown reducer 'mpi'", "choose from auto, nccl, symm"),
    ("generate stories -p x --kv-cache-dtype fp4", "unknown kv-cache-dtype 'fp4'", "choose from auto, fp8"),
    ("generate stories -p x --comm-dtype fp8", "unknown comm-dtype 'fp8'", "choose from same, bf16"),
    ("generate stories -p x --temperature -1", "temperature must be between 0 and 1000", "got -1"),
    ("generate stories -p x --top-p 2", "top-p must be between 0 and 1", "got 2"),
    ("generate stories -p x --max-tokens 0", "max-new-tokens must be between 1", "got 0"),
    ("generate stories -p x --max-tokens 99999", "99999 new ones exceed the model's context of 512", "use --max-tokens 511"),
    ("generate stories -p x --seed -1", "seed must be between 0", "got -1"),
    ("generate stories -p x --timeout 0", "--timeout must be above 0", "got 0"),
    ("generate stories -p x --batch-size 0", "--batch-size must be at least 1", "got 0"),
    ("generate stories -p x --emulate tp=8", "cannot emulate 'tp=8'", "write tp=8,link="),
    ("generate stories -p x --emulate tp=2,link=24us --tp 2", "brings its own tp", "leave out --tp 2"),
    ("generate storis -p x", "no checkpoint directory at storis", "did you mean 'stories'"),
    ("generate stories/nested -p x", "no checkpoint directory at stories/nested", "or a hub id owner/name"),
    ("generate /nothing/there -p x", "no checkpoint directory at /nothing/there", "give a directory with config.json"),
    ("generate nobody/nothing -p x", "nobody/nothing is no local directory", "give the path of a directory, or go online"),
    ("generate prompts.txt -p x", "prompts.txt is a file", "a checkpoint is a directory"),
    ("generate https://huggingface.co/nobody/nothing/tree/main -p x", "is an address", "the hub id nobody/nothing"),
    ("generate model.gguf -p x", "model.gguf is a GGUF file", "use the safetensors"),
    ("generate gguf -p x", "only GGUF weights (q4.gguf)", "use the safetensors"),
    ("generate pickled -p x", "only pickled weights (pytorch_model.bin)", "save_pretrained"),
    ("generate quantised -p x", "quant_method is 'bitsandbytes'", "supported: fp8 of compressed-tensors"),
    ("generate remote -p x", "'mystery' comes with Python code of its own", "supported: "),
    ("generate bert -p x", "unknown family: model_type 'bert'", "supported: "),
    ("generate typo -p x", "model_type 'lama'", "did you mean 'llama'"),
    ("generate empty -p x", "empty has no config.json", "is it a Hugging Face checkpoint?"),
    ("generate broken -p x", "config.json is not readable JSON", "line 1"),
    ("generate weightless -p x", "has neither model.safetensors nor", "download the model again"),
    ("generate shallow -p x", "the weights of 5 layers", "config.json calls for 7"),
    ("generate mute -p x", "mute has no tokenizer", "copy the tokenizer files of the original model"),
    ("chat stories", "no chat template", "use `ladder generate`"),
    ("chat stories --tp 3 --top-k -1", "top-k must be between 0", "got -1"),
    ("convert stories stories --wiring ladder", "are the same directory", "choose another target"),
    ("convert stories pinned --wiring ladder", "pinned is not empty", "pass --overwrite"),
    ("convert stories prompts.txt/x --wiring ladder", "prompts.txt is not a directory", "choose another target"),
    ("convert stories out --wiring laddr", "unknown wiring 'laddr'", "did you mean 'ladder'"),
    ("convert stories out --wiring ladder --layers 2", "--layers belong to --wiring auto", "named already"),
    ("convert stories out --wiring auto", "--wiring auto measures", "--calibration FILE"),
    ("convert stories out --wiring auto --calibration no.txt", "--wiring auto needs", "--layers K (how many)"),
    ("convert stories out --wiring auto --layers 2 --calibration no.txt", "--calibration no.txt", "no such file"),
    ("convert stories out --wiring auto --layers 9 --calibration prompts.txt", "cannot convert 9 layers", "choose 1 to 5"),
    ("convert stories out --wiring auto --budget -1 --calibration prompts.txt", "above 0", "got -1"),
    ("inspect storis", "no checkpoint directory at storis", "did you mean 'stories'"),
    ("eval stories", "nothing to do", "--perplexity FILE"),
    ("eval stories --perplexity no.txt", "cannot read no.txt", "takes a text file"),
    ("eval stories --perplexity prompts.txt --stride 0", "got 0", "the stride must be between 1 and"),
    ("eval stories --perplexity prompts.txt --out r.txt", "got r.txt", "ends in .json"),
    ("eval stories --perplexity prompts.txt --out prompts.txt/r.json", "prompts.txt is not a directory", "choose another target"),
    ("eval stories --perplexity prompts.txt --tp 3", "tp=3 does not divide", "use tp in [1, 2, 4]"),
    ("eval stories --perplexity prompts.txt --against storis", "no checkpoint directory at storis", "did you mean 'stories'"),
    ("adapt storis --method sft --data prompts.txt", "no checkpoint directory at storis", "did you mean 'stories'"),
    ("adapt pinned --data prompts.txt", "method distill learns from the original model", "--teacher SRC"),
    ("adapt pinned --teacher storis --data prompts.txt", "no checkpoint directory at storis", "did you mean 'stories'"),
    ("adapt pinned --teacher stories", "no data", "--data FILE"),
    ("adapt pinned --teacher stories --data no.txt", "no file or directory no.txt", "OWNER/NAME"),
    ("adapt pinned --teacher stories --data prompts.txt --heldout no.txt", "no file or directory no.txt", "OWNER/NAME"),
    ("adapt pinned --teacher stories --data prompts.txt --sequence 1024", "sequence=1024", "context of 512; use at most that"),
    ("adapt pinned --teacher stories --data prompts.txt --schedule cosin", "'cosin'", "did you mean 'cosine'"),
    ("adapt pinned --teacher stories --data prompts.txt --batch-tokens 1000", "batch_tokens=1000", "use 1024"),
    ("adapt pinned --teacher stories --data prompts.txt --out stories", "the result would replace", "choose another --out"),
    ("data prepare no.txt corpus --tokenizer stories", "no file or directory no.txt", "OWNER/NAME"),
    ("data prepare model.gguf corpus --tokenizer stories", "model.gguf", "known are .txt"),
    ("data prepare prompts.txt corpus --tokenizer storis", "no checkpoint directory at storis", "did you mean 'stories'"),
    ("data prepare prompts.txt pinned --tokenizer stories", "pinned is a checkpoint", "choose another directory"),
    ("data sample stories new.jsonl --tokens 0", "--tokens must be at least 1", "got 0"),
    ("data sample storis new.jsonl --tokens 9", "no checkpoint directory at storis", "did you mean 'stories'"),
    ("data sample stories prompts.txt/new.jsonl --tokens 9", "prompts.txt is not a directory", "choose another target"),
    ("data inspect nowhere", "nowhere has no index.json", "no such directory"),
    ("train no.toml", "there is no recipe no.toml", "no.toml"),
    ("train recipe.toml", "the recipe names no data.train", "a directory written by `ladder data prepare`"),
    ("train recipe.toml --set run.stps=3", "run.stps", "did you mean 'steps'"),
    ("train recipe.toml --set data.train=nowhere", "nowhere has no index.json", "no such directory"),
    ("bench overlap --model llama-9", "'llama-9'", "choose from llama-3.2-1b"),
    ("bench overlap --wirings standard,laddr", "'laddr'", "did you mean 'ladder'"),
    ("bench overlap --model ladder-1b --tp 3", "tp=3 does not divide", "use tp in [1, 2, 4"),
    ("bench train --wirings desync-2x@8", "was made for tp=8, this run has tp=2", "run with tp=8"),
    ("bench overlap --latency 5", "'5' has no unit", "500us or 2ms"),
    ("bench overlap --phase decoding", "unknown phase 'decoding'", "did you mean 'decode'"),
    ("bench overlap --repeats 2", "--repeats must be at least 5", "got 2"),
    ("bench decode --links 5mz", "'5mz'", "write none, 24us"),
    ("bench link --tp 1", "--tp 1 has no link", "2 or more"),
    ("bench calibrate --out prompts.txt/x.toml", "prompts.txt is not a directory", "choose another target"),
    ("trace run --wirings laddr", "unknown wiring 'laddr'", "did you mean 'ladder'"),
    ("trace run --model stories --layers 2", "--layers 2", "measured whole"),
    ("trace run --out prompts.txt/trace", "prompts.txt is not a directory", "choose another target"),
    ("report", "give the results", "JSON files or folders"),
    ("report no.json", "cannot read no.json", "give JSON results"),
    ("report stories --out prompts.txt/x.html", "prompts.txt is not a directory", "choose another target"),
    ("report stories --plots prompts.txt", "prompts.txt is not a directory", "choose another target"),
    ("report prompts.txt", "prompts.txt", "not a readable JSON result"),
    ("report broken/config.json", "config.json", "not a readable JSON result"),
    ("plan", "say which model", "--list"),
    ("plan --model stories --tp 3", "tp=3 does not divide", "use tp in [1, 2, 4]"),
    ("plan llama-3-70b", "(llama-3-70b)", "a model goes behind --model"),
    ("plan --model llama-3-70b --device h10", "unknown device 'h10'", "did you mean 'h100'"),
    ("plan --model llama-3-70b --hardware no.toml", "cannot read hardware file no.toml", "No such file"),
    ("plan --model lama-3-70b", "'lama-3-70b'", "did you mean 'llama-3-70b'"),
]  # fmt: skip


# What is answered without torch, and so within a second.
QUICK = [
    "--help",
    "-h",
    "inspect stories",
    "inspect stories --json",
    "plan --model llama-3-70b",
    "plan --model stories --tp 2 --json",
    "trace plan -o timeline",
    "demo --export again",
    "report timeline --out report.html",
]


@pytest.fixture(scope="module")
def answers(demo_dir, tmp_path_factory):
    """Exit code and output of every mistake, made in a folder with these things in it."""
    here = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(demo_dir, here / "stories")

    def model(name, drop=(), add=(), **config):
        shutil.copytree(demo_dir, here / name, ignore=shutil.ignore_patterns(*drop))
        fields = json.loads((demo_dir / "config.json").read_text())
        (here / name / "config.json").write_text(json.dumps(fields | config))
        for file in add:
            (here / name / file).write_bytes(b"x")

    model("pinned", model_type="ladder_llama", wiring="desync-2x@2")
    model("gguf", drop=["*.safetensors"], add=["q4.gguf"])
    model("pickled", drop=["*.safetensors"], add=["pytorch_model.bin"])
    model("quantised", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    convert(demo_dir, here / "eighths", quantize="fp8")
    model("remote", model_type="mystery", auto_map={"AutoModelForCausalLM": "modeling_mystery.Mystery"})
    model("bert", model_type="bert")
    model("typo", model_type="lama")
    model("weightless", drop=["*.safetensors"])
    model("shallow", num_hidden_layers=7)
    model("mute", drop=["tokenizer*"])
    (here / "empty").mkdir()
    (here / "broken").mkdir()
    (here / "broken" / "config.json").write_text("{")
    (here / "model.gguf").write_bytes(b"x")
    (here / "recipe.toml").write_text('[model]\npreset = "ladder-1b"\n')
    (here / "prompts.txt").write_text("Once upon a time\n")
    (here / "done.jsonl").write_text('{"prompt": "Once upon a time"}\n')
    (here / "latin1.txt").write_bytes("Once\nCaf\u00e9\n".encode("latin-1"))
    (here / "empty.txt").write_text("\n")
    (here / "bad.jsonl").write_text('{"text": "x"}\n')
    lines = [*(line for line, *_ in MISTAKES), *QUICK]
    words = json.dumps([line.split() for line in lines])
    done = subprocess.run([sys.executable, "-c", RUN_ALL], input=words, capture_output=True, text=True, cwd=here, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", QUICK)
def test_what_needs_no_torch_runs_without_it(answers, line):
    code, said = answers[line]
    assert not code, said
    assert said


@pytest.mark.parametrize(("line", "value", "fix"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_one_line_with_the_value_and_the_fix(answers, line, value, fix):
    code, said = answers[line]
    assert code == 2, said
    assert said.startswith("error: "), said
    assert len(said.splitlines()) == 1, said
    assert value in said
    assert fix in said
