"""Log-probabilities with torch alone: what the harness asks for, and perplexity.

python -m ladder_residual.evaluate.score MODEL requests.jsonl.gz scores.json

The requests come from ``ladder eval --requests-out``, the scores go back to ``ladder eval --scores-in``. Under torchrun every
rank holds its share of the model and runs all requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.environment import environment
from ..models.finite import NonFiniteError, fix_for, is_finite
from ..models.hf_config import wiring_of
from .plan import check_windows
from .requests import Request, Requests, Score, Scores

BATCH_TOKENS = {"cuda": 65536, "cpu": 4096}  # a batch of a small model's tokens that keeps the device busy
_SOFTMAX_ELEMENTS = 1 << 26  # float32 logits looked at in one go: 256 MiB

Row = tuple[tuple[int, ...], list[int]]  # a model input, and the requests (by number) it answers
Progress = Callable[[int], Any]  # called with the number of requests just answered


@torch.no_grad()  # not inference_mode: a model scored between training steps must go on training
def score(
    model: Any, requests: Sequence[Request], batch_tokens: int | None = None, progress: Progress | None = None
) -> list[Score]:
    """One score per request. Batches hold inputs of like length and about ``batch_tokens`` tokens; their make-up does not depend
    on the order of the requests. Softmax in float32, sums in float64."""
    device = model.get_input_embeddings().weight.device
    if batch_tokens is None:
        batch_tokens = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    if batch_tokens < 1:
        raise ValueError(f"a batch holds at least 1 token, got {batch_tokens}")
    check_fits(model.config, requests)
    answers: dict[int, Score] = {}
    was_training = model.training
    model.eval()
    try:
        for batch in _batches(requests, batch_tokens):
            found = dict(_score_batch(model, requests, batch, device))
            answers |= found
            if progress is not None:
                progress(len(found))
    finally:
        model.train(was_training)
    return [answers[number] for number in range(len(requests))]


def check_fits(config: Any, requests: Sequence[Request]) -> None:
    """ValueError where a request is none this model can answer."""
    limit, vocabulary = getattr(config, "max_position_embeddings", None), config.vocab_size
    for number, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise ValueError(f"request {number} has no {'continuation' if context else 'context'}; both need a token at least")
        if limit and len(context) + len(continuation) - 1 > limit:
            raise ValueError(
                f"request {number} has {len(context) + len(continuation)} tokens, the model's context is {limit}; "
                f"make the requests with --max-length {limit}"
            )
        if max(max(context), max(continuation)) >= vocabulary:
            raise ValueError(
                f"request {number} holds token {max(max(context), max(continuation))}, the model knows {vocabulary}: "
                "the requests were made with another tokenizer"
            )


def _batches(requests: Sequence[Request], batch_tokens: int) -> Iterator[list[Row]]:
    # Answers that differ in their last token alone (A, B, C, D) share an input: one forward pass scores them all.
    inputs: dict[tuple[int, ...], list[int]] = {}
    for number, (context, continuation) in enumerate(requests):
        inputs.setdefault((*context, *continuation)[:-1], []).append(number)

    def order(row: Row) -> tuple[int, int, tuple[int, ...]]:
        # Longest first: what does not fit into memory fails at once. Then by where scoring begins: fewer logits are computed.
        return -len(row[0]), min(len(requests[number].context) for number in row[1]), row[0]

    batch: list[Row] = []
    for row in sorted(inputs.items(), key=order):
        if batch and (len(batch) + 1) * len(batch[0][0]) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _score_batch(
    model: Any, requests: Sequence[Request], batch: list[Row], device: torch.device
) -> Iterator[tuple[int, Score]]:
    width = len(batch[0][0])
    # Padding is on the right: attention is causal, so no position that counts sees it, and no mask is needed.
    ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in batch], device=device)  # [batch, width]
    owners: list[int] = []  # of every scored token: its request, its row, the position that predicts it, and itself
    rows: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for row, (_, numbers) in enumerate(batch):
        for number in numbers:
            context, continuation = requests[number]
            owners += [number] * len(continuation)
            rows += [row] * len(continuation)
            positions += range(len(context) - 1, len(context) - 1 + len(continuation))  # each predicts the token after it
            targets += continuation
    first = min(positions)
    kept = torch.arange(first, max(positions) + 1, device=device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits  # [batch, kept, vocabulary]
    row_of, place = torch.tensor(rows, device=device), torch.tensor(positions, device=device) - first
    target = torch.tensor(targets, device=device)
    size = max(1, _SOFTMAX_ELEMENTS // logits.shape[-1])
    logprobs, hits = [], []
    for start in range(0, len(targets), size):
        part = slice(start, start + size)
        logprob, hit = _look_up(logits[row_of[part], place[part]], target[part])
        logprobs.append(logprob)
        hits.append(hit)
    found = torch.cat(logprobs)
    if not is_finite(found):
        raise NonFiniteError(f"the logits of a row of {width} tokens are NaN or infinite{fix_for(model.dtype)}")
    totals: dict[int, tuple[float, bool]] = {}
    for owner, logprob, hit in zip(owners, found.tolist(), torch.cat(hits).tolist(), strict=True):
        total, greedy = totals.get(owner, (0.0, True))
        totals[owner] = (total + logprob, greedy and hit)
    for number, (total, greedy) in totals.items():
        yield number, Score(total, greedy)


def _look_up(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target ``[n]`` under logits ``[n, vocabulary]``, and whether it is the most likely token."""
    logits = logits.float()
    chosen = logits.gather(1, target[:, None])[:, 0]
    return chosen - logits.logsumexp(1), logits.argmax(1) == target


@dataclass(frozen=True)
class Perplexity:
    """Of a text, scored window by window."""

    tokens: int
    nats: float
    windows: tuple[tuple[int, float], ...] = ()  # tokens and nats of each window, for a paired comparison

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def ppl(self) -> float:
        return math.exp(min(self.nats_per_token, 700.0))


def windows_of(ids: Sequence[int], context: int, stride: int) -> list[Request]:
    """The usual protocol: windows of ``context`` tokens begin ``stride`` apart, and each scores the tokens no earlier one has.
    The first token of the text has nothing before it and is not scored, nor are window starts when the stride equals the context."""
    check_windows(context, stride)
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} token(s); at least 2 are needed to score one")
    windows, scored = [], 0
    for begin in range(0, len(ids), stride):
        end, start = min(begin + context, len(ids)), max(scored, begin + 1)
        if start < end:
            windows.append(Request(ids[begin:start], ids[start:end]))
        scored = end
        if end == len(ids):
            break
    return windows


def perplexity_of(windows: Sequence[Request], scores: Sequence[Score]) -> Perplexity:
    parts = tuple((len(window.continuation), -found.logprob) for window, found in zip(windows, scores, strict=True))
    return Perplexity(sum(tokens for tokens, _ in parts), math.fsum(nats for _, nats in parts), parts)


def perplexity(
    model: Any,
    ids: Sequence[int],
    context: int = 1024,
    stride: int = 512,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Of the text with these token ids."""
    windows = windows_of(ids, context, stride)
    return perplexity_of(windows, score(model, windows, batch_tokens, progress))


def score_all(model: Any, requests: Requests, batch_tokens: int | None = None, progress: Progress | None = None) -> Scores:
    """Every group of a requests file; ``about`` says what was scored, on what, and how long it took."""
    started = time.perf_counter()
    found: dict[str, Score] = {}
    for group in requests.groups.values():
        found |= Scores.of(group, score(model, group, batch_tokens, progress)).by_key
    took = {"seconds": round(time.perf_counter() - started, 3), "requests": len(requests)}
    kind = {"wiring": wiring_of(model.config).spec, "dtype": str(model.dtype).removeprefix("torch.")}
    return Scores(found, {**kind, **took, **environment()})


def main() -> None:
    import argparse

    from ..distributed.launch import run_command

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], prog="python -m ladder_residual.evaluate.score")
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("requests", help="file from `ladder eval --requests-out`")
    parser.add_argument("scores", type=Path, help="file to write, for `ladder eval --scores-in`")
    parser.add_argument("--wiring", help="another wiring than the checkpoint's own")
    parser.add_argument("--dtype", default="auto", help="auto is bfloat16 on CUDA and as stored elsewhere")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--batch-tokens", type=int, help=f"default: {BATCH_TOKENS['cuda']} on CUDA, {BATCH_TOKENS['cpu']} on CPU"
    )
    options = parser.parse_args()
    run_command(lambda: _run(options))


def _run(options: Any) -> None:
    from ..distributed.world import distributed
    from ..models.loading import load_model

    requests = Requests.load(options.requests)
    with distributed(options.device) as world:
        dtype = "bfloat16" if options.dtype == "auto" and world.device.type == "cuda" else options.dtype
        model = load_model(options.model, world, wiring=options.wiring, dtype=dtype)
        scores = score_all(model, requests, options.batch_tokens)
        if world.is_main:
            Scores(scores.by_key, {"model": options.model, "tp": world.size, **scores.about}).save(options.scores)
            print(f"{len(requests)} requests scored in {scores.about['seconds']:.1f} s, written to {options.scores}")


if __name__ == "__main__":
    main()
