"""A recipe small enough for tests, its corpus, and ways to run it: in this process, in a child, on ranks."""

import json
import signal
import time

import pytest
import torch

from lab.corpora import write_corpus
from ladder_residual.train.layout import arranged
from ladder_residual.train.logs import read_log
from ladder_residual.train.loop import Loop, train
from ladder_residual.train.recipe import Recipe
from tests.ranks import CONTEXT

LAYOUTS = {"tp2": (2, 2), "dp2": (2, 1), "dp2 x tp2": (4, 2)}  # ranks, tp
MODEL = dict(hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=1, vocab_size=512, init_std=0.05)


def tiny_corpus(directory, tokens=6000):
    """Documents whose next token is often the last one plus a step: something to learn within twenty updates."""
    generator = torch.Generator().manual_seed(7)
    steps = torch.randint(0, 4, (tokens // 60, 60), generator=generator)
    documents = [(1 + (7 * number + row.cumsum(0)) % 40).tolist() for number, row in enumerate(steps)]
    write_corpus(directory, documents, vocab_size=512, end_of_document=0)
    return directory


def tiny_recipe(corpus, directory, wiring="ladder", **changes):
    document = dict(
        name="tiny",
        model=MODEL | {"wiring": wiring},
        data=dict(train=str(corpus), valid=str(corpus), sequence=16),
        batch=dict(rows=8, micro_rows=2),
        optimizer=dict(lr=1e-2, warmup=2),
        run=dict(steps=20, precision="fp32", device="cpu", timeout=60.0),
        evaluate=dict(rows=6),
        checkpoint=dict(directory=str(directory), export=False),
        log=dict(every=1, tensorboard=False),
    )
    for table, values in changes.items():
        document[table] = document.get(table, {}) | values
    return document


def trained_losses(directory):
    """{step: (loss, gradient norm)} of a run."""
    events = [event for event in read_log(directory) if event["event"] == "train"]
    return {event["step"]: (event["loss"], event["grad_norm"]) for event in events}


def train_on_ranks(world, documents, **options):
    """Each recipe in turn on these ranks, arranged as it says. Returns what Loop.run returned, or the error."""
    results = []
    for document in documents:
        recipe = Recipe.from_dict(document)
        with arranged(world, 60, recipe.parallel.tp, recipe.parallel.dp) as layout:
            loop = Loop(recipe, layout, resume="auto", quiet=True)
            try:
                results.append(loop.run(options.get("stop_after")) | {"messages": loop.messages})
            finally:
                loop.close()
    return results


def _train_in_child(document):
    import torch

    torch.set_num_threads(1)
    train(Recipe.from_dict(document), quiet=True)


def train_and_kill(document, when):
    """Train in a process of its own and kill it as soon as ``when()`` is true. Returns its exit code."""
    process = CONTEXT.Process(target=_train_in_child, args=(document,))
    process.start()
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline:
        if when():
            process.kill()
            break
        time.sleep(0.0005)
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode


def steps_logged(directory):
    path = directory / "log.jsonl"
    if not path.exists():
        return 0
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()[:-1] if line.endswith("}")]
    return max(steps, default=0)


def check_same(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for step, (loss, norm) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=tolerance), step
        assert found[step][1] == pytest.approx(norm, rel=20 * tolerance), step  # the norm magnifies what the loss rounds


def as_toml(document):
    lines = [f"name = {document['name']!r}"]
    for table, values in document.items():
        if isinstance(values, dict):
            lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines)
