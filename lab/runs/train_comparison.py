"""The wirings trained from scratch on one GPU: same model, same data order, same hyper-parameters, several seeds.

    python -m lab.runs.train_prepare TEXTS data/books
    python -m lab.runs.train_comparison --data data/books --out results/train

Worker processes take the runs from a list, ``--jobs`` at a time: a model of this size leaves a large GPU idle between its kernels,
and several fill it. ``comparison.json`` in ``--out`` is rewritten every few seconds, so a run that is cut short keeps all it has.
"""

import argparse
import json
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

# Wiring, emulated ranks. Delayed and desync depend on the ranks: two are computed by one process.
WIRINGS = {
    "standard": ("standard", 1),
    "ladder": ("ladder", 1),
    "parallel": ("parallel", 1),
    "hybrid-half": ("ladder:last-half", 1),
    "desync-2x": ("desync-2x", 2),
    "delayed-1": ("delayed-1", 2),
}
DEFAULT_RUNS = "ladder-0,standard-0,desync-2x-0,parallel-0,hybrid-half-0,delayed-1-0,standard-1,ladder-1,standard-2,ladder-2"
SHAPES = {
    "47m": dict(hidden_size=512, intermediate_size=1408, num_layers=12, num_heads=8, tied_embeddings=True),
    "22m": dict(hidden_size=384, intermediate_size=1024, num_layers=9, num_heads=6, tied_embeddings=True),
    "tiny": dict(hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, tied_embeddings=True),
}


def split_name(name, options):
    """``ladder-0`` or, with another learning rate than --lr, ``ladder-0@2e-3``."""
    run, at, lr = name.partition("@")
    label, _, seed = run.rpartition("-")
    return label, int(seed), float(lr) if at else options.lr


def recipe_of(name, options, directory):
    from ladder_residual.data.corpus import Corpus
    from ladder_residual.train.recipe import Recipe

    label, seed, lr = split_name(name, options)
    wiring, ranks = WIRINGS[label]
    vocabulary = -(-Corpus.open(options.data / "train").vocab_size // 64) * 64
    evaluations = max(1, options.steps // options.evaluations)
    return Recipe.from_dict(
        dict(
            name=name,
            model=dict(SHAPES[options.shape], vocab_size=vocabulary, wiring=wiring),
            data=dict(train=str(options.data / "train"), valid=str(options.data / "valid"), sequence=options.sequence),
            batch=dict(rows=options.rows),
            parallel=dict(emulate_ranks=ranks),
            optimizer=dict(lr=lr, warmup=max(1, options.steps // 12), final_lr=0.1, weight_decay=0.1),
            run=dict(steps=options.steps, seed=seed, precision=options.precision, compile=not options.eager, loss_chunk=16384),
            evaluate=dict(every=evaluations, first=True, rows=options.valid_rows),
            checkpoint=dict(directory=str(directory / name), enabled=False),
            log=dict(every=10, tensorboard=False),
        )
    )


def worker(tasks, reports, options, directory):
    import torch

    from ladder_residual.train.loop import train

    torch.set_num_threads(2)
    while True:
        try:
            name = tasks.get_nowait()
        except queue.Empty:
            return
        reports.put((name, "started", time.time()))
        try:
            train(recipe_of(name, options, directory), quiet=True)
            reports.put((name, "done", time.time()))
        except Exception:
            reports.put((name, "failed: " + traceback.format_exc()[-1500:], time.time()))


def collect(names, options, directory, states, began):
    from ladder_residual.train.logs import read_log
    from ladder_residual.train.speed import flops_per_token

    runs = []
    for name in names:
        folder = directory / name
        events = read_log(folder) if (folder / "log.jsonl").exists() else []
        trains = [event for event in events if event["event"] == "train"]
        runs.append(
            dict(
                run=name,
                wiring=split_name(name, options)[0],
                seed=split_name(name, options)[1],
                lr=split_name(name, options)[2],
                state=states.get(name, ("waiting",))[0],
                losses=[[event["step"], round(sum(event["losses"]) / len(event["losses"]), 5)] for event in trains],
                grad_norms=[round(event["grad_norm"], 4) for event in trains],
                valid=[[event["step"], event["loss"]] for event in events if event["event"] == "valid"],
                tokens_per_s=sorted(event["tokens_per_s"] for event in trains)[len(trains) // 2] if trains else None,
                memory_gib=trains[-1].get("memory_gib") if trains else None,
            )
        )
    recipe = recipe_of(names[0], options, directory)
    from ladder_residual.common.environment import environment

    result = dict(
        benchmark="train-comparison",
        data="public-domain books, 16k BPE",
        shape=options.shape,
        parameters=recipe.model.shape().parameters,
        recipe=recipe.to_dict() | {"name": None, "checkpoint": None},
        jobs=options.jobs,
        flops_per_token=flops_per_token(recipe.model.shape(), options.sequence),
        tokens_per_step=recipe.tokens_per_step,
        seconds=round(time.time() - began, 1),
        runs=runs,
        **environment(),
    )
    if options.device_name:
        result["device"] = options.device_name
    path = options.out / "comparison.json"
    path.with_suffix(".tmp").write_text(json.dumps(result))
    path.with_suffix(".tmp").replace(path)
    return runs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="holds train/ and valid/, written by `ladder data prepare`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", default=DEFAULT_RUNS)
    parser.add_argument("--shape", default="47m", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--evaluations", type=int, default=10)
    parser.add_argument("--valid-rows", type=int)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=560, help="give up after this; what is there is kept")
    options = parser.parse_args()
    names = options.runs.split(",")
    unknown = [name for name in names if split_name(name, options)[0] not in WIRINGS]
    if unknown:
        raise SystemExit(f"unknown runs {unknown}; wirings: {', '.join(WIRINGS)}, each with -SEED")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    options.device_name = None
    context = multiprocessing.get_context("spawn")
    tasks, reports = context.Queue(), context.Queue()
    for name in names:
        tasks.put(name)
    directory = Path(tempfile.mkdtemp(prefix="train-comparison-"))
    import torch

    if torch.cuda.is_available():
        options.device_name = torch.cuda.get_device_name()
    jobs = min(options.jobs, len(names))
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    workers = [context.Process(target=worker, args=(tasks, reports, options, directory)) for _ in range(jobs)]
    for process in workers:
        process.start()
    states = {}
    last = 0.0
    while any(process.is_alive() for process in workers) and time.time() - began < options.seconds:
        try:
            name, state, _ = reports.get(timeout=2)
            states[name] = (state,)
            print(f"{time.time() - began:.0f} s: {name} {state}", flush=True)
        except queue.Empty:
            pass
        if time.time() - last > 4:
            collect(names, options, directory, states, began)
            last = time.time()
    while not reports.empty():
        name, state, _ = reports.get()
        states[name] = (state,)
    runs = collect(names, options, directory, states, began)
    for process in workers:
        process.terminate()
    for run in runs:
        valid = f"valid {run['valid'][-1][1]:.4f} at step {run['valid'][-1][0]}" if run["valid"] else "no evaluation"
        print(f"{run['run']:16} {run['state'][:300]:8} {valid}, {run['tokens_per_s'] or 0:,.0f} tokens/s")
    shutil.rmtree(directory, ignore_errors=True)
    sys.exit(0 if all(run["state"] == "done" for run in runs) else 1)


if __name__ == "__main__":
    main()
