"""Many rows decoded side by side, all at the same position: thousands of samples a step on a GPU, and the same code on a CPU.

Because every row is at the same position there is no padding: one mask row serves all, prompts are fed through the same step as
everything else, and nothing but the position changes between steps. So a whole step (model, sampling, bookkeeping) is one CUDA
graph, replayed without any Python work per token; the attended window grows in blocks, each with its graph. Rows that have ended
are dropped when half of them have: the cache is squeezed and decoding goes on at half the width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

from ..models.finite import NonFiniteError, fix_for

ATTENTION = "ladder_batched_sampling"
WINDOW = 64  # the attended length is rounded up to this; also what memory-efficient attention wants masks aligned to
CHECK_EVERY = 16  # steps between two looks at how many rows are left: a look waits for the device
EMPTY = -1  # in the output: nothing was written there


def register_attention() -> None:
    AttentionInterface.register(ATTENTION, grouped_attention)


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One new token per row. Query heads that share a key head become rows of one small matrix, so the cache is read once and
    never expanded to the query's heads."""
    rows, heads, dim = query.shape[0], query.shape[1], query.shape[3]
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1]), None


@dataclass
class _Place:
    """Where the current step writes and how much it attends to; shared by all layers of the cache."""

    position: Tensor  # [1], on the device: the same graph serves every position
    rows: int
    window: int


class _CacheLayer(DynamicLayer):
    """Keys and values of one layer, [most rows, heads, length, dim], allocated once."""

    keys: Tensor
    values: Tensor

    def __init__(self, place: _Place, rows: int, length: int) -> None:
        super().__init__()
        self.place, self.most_rows, self.length = place, rows, length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        for name, new in (("keys", key_states), ("values", value_states)):
            # Zeros: what a masked position holds is multiplied by 0, and garbage could be NaN.
            setattr(self, name, new.new_zeros(self.most_rows, new.shape[1], self.length, new.shape[-1]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place, keys, values = self.place, self.keys, self.values
        keys[: place.rows].index_copy_(2, place.position, key_states)
        values[: place.rows].index_copy_(2, place.position, value_states)
        return keys[: place.rows, :, : place.window], values[: place.rows, :, : place.window]

    def get_seq_length(self) -> int:
        return self.place.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.window, 0

    def squeeze(self, kept: Tensor, used: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[: len(kept), :, :used] = tensor[:, :, :used].index_select(0, kept)


@dataclass(frozen=True)
class Start:
    """How rows begin: ``prompts`` [rows, length], EMPTY where a row has no further given token; ``chat`` [rows] says which of
    them write a user's turn first. Those go on with ``answer_header`` after the first ``end_of_turn``."""

    prompts: Tensor
    chat: Tensor
    end_of_turn: int = EMPTY
    answer_header: tuple[int, ...] = ()


class BatchedSampler:
    """Samples up to ``rows`` sequences of up to ``length`` tokens, start included. Use it again for every batch."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int,
        length: int,
        temperature: float,
        stops: set[int],
        vocabulary: int,
        smallest: int | None = None,
        graphs: bool | None = None,
    ) -> None:
        self.model, self.most_rows, self.length, self.temperature = model, rows, length, temperature
        self.vocabulary = vocabulary
        self.device, self.dtype = model.device, model.dtype
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        # Every width has its graphs, and a GPU gains nothing from going below some hundred rows.
        self.smallest = smallest or (max(64, rows // 16) if self.graphs else 1)
        integers = {"dtype": torch.int64, "device": self.device}
        self.stops = torch.tensor(sorted(stops), **integers)
        capacity = -(-length // WINDOW) * WINDOW
        self.columns = torch.arange(capacity, **integers)
        self.place = _Place(torch.zeros(1, **integers), rows, WINDOW)
        self.layers = [_CacheLayer(self.place, rows, capacity) for _ in range(model.config.num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))
        self.out = torch.full((rows, length), EMPTY, **integers)
        self.origin = torch.arange(rows, **integers)  # a row's place in the batch: rows move when the batch is squeezed
        self.given = torch.zeros(rows, **integers)  # tokens each row begins with
        # Of a chat: -1 in the user's turn, 0.. while the answer's header is forced, its length from then on.
        self.stage = torch.zeros(rows, **integers)
        self.done = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.end_of_turn = torch.zeros(1, **integers)
        self.header = torch.zeros(1, **integers)
        self.first_bad = torch.full((1,), EMPTY, **integers)  # the step whose logits were NaN or infinite
        self._answering = 0  # the stage from which a row's tokens are its own again: the header's length
        self._captured: dict[tuple[int, int], Any] = {}  # (rows, window) -> graph, or None after its first, eager step
        self._pool: Any = None
        self._stream = torch.cuda.Stream(self.device) if self.graphs else None

    @torch.inference_mode()
    def sample(self, start: Start, seed: int, report: Callable[[int, int], None] = lambda step, rows: None) -> list[Tensor]:
        """Every row's tokens, the given ones included. ``report(step, rows)`` is called now and then with the rows that are left."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            return self._sample(start, seed, report)

    def _sample(self, start: Start, seed: int, report: Callable[[int, int], None]) -> list[Tensor]:
        torch.manual_seed(seed)
        rows = self._begin(start)
        finished: list[tuple[Tensor, Tensor]] = []
        for step in range(self.length - 1):
            if step % CHECK_EVERY == 0 and step:
                self._check_finite()
                left = int((~self.done[:rows]).sum())
                report(step, left)
                if left == 0:
                    break
                while left <= rows // 2 and rows // 2 >= self.smallest:
                    rows = self._squeeze(rows, rows // 2, step, finished)
            self._step(rows, min(-(-(step + 1) // WINDOW) * WINDOW, len(self.columns)))
        self._check_finite()
        finished.append((self.origin[:rows].cpu(), self.out[:rows].cpu()))
        origin, out = (torch.cat(parts) for parts in zip(*finished, strict=True))
        return [row[row != EMPTY] for row in out[torch.argsort(origin)]]

    def _check_finite(self) -> None:
        if int(self.first_bad) != EMPTY:
            raise NonFiniteError(f"the logits of step {int(self.first_bad)} are NaN or infinite{fix_for(self.dtype)}")

    def _begin(self, start: Start) -> int:
        rows, width = start.prompts.shape
        if rows > self.most_rows or width >= self.length:
            raise ValueError(
                f"{rows} prompts of up to {width} tokens do not fit a decoder of {self.most_rows} rows and {self.length} tokens"
            )
        if len(start.answer_header) != self._answering:
            self._answering = len(start.answer_header)
            self.header = torch.zeros(max(1, self._answering), dtype=torch.int64, device=self.device)
            self._captured.clear()  # graphs hold the old ones
        if start.answer_header:
            self.header.copy_(torch.tensor(start.answer_header))
        self.end_of_turn.fill_(start.end_of_turn)
        self.out[:rows].fill_(EMPTY)
        self.out[:rows, :width] = start.prompts.to(self.device)
        self.given[:rows] = (start.prompts != EMPTY).sum(1).to(self.device)
        self.stage[:rows] = torch.where(start.chat.to(self.device), -1, len(start.answer_header))
        self.origin[:rows] = torch.arange(rows, device=self.device)
        self.done[:rows] = False
        self.first_bad.fill_(EMPTY)
        self.place.position.zero_()
        return rows

    def _step(self, rows: int, window: int) -> None:
        """Run one step: the first of its kind as it is, the second while recording it, later ones from the recording."""
        key = (rows, window)
        if not self.graphs or key not in self._captured:
            self._captured[key] = None
            self._compute(rows, window)
            return
        if self._captured[key] is None:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    self._compute(rows, window)
            except RuntimeError as error:
                warnings.warn(f"no CUDA graph, decoding will be slower: {str(error).splitlines()[0]}", stacklevel=2)
                self.graphs = False
                self._compute(rows, window)
                return
            self._pool = self._pool or graph.pool()  # graphs never run at the same time: all share one pool
            self._captured[key] = graph
        self._captured[key].replay()

    def _compute(self, rows: int, window: int) -> None:
        """Feed the tokens at the current position, and fill in the next one."""
        self.place.rows, self.place.window = rows, window
        position = self.place.position
        out, given, stage, done = (state[:rows] for state in (self.out, self.given, self.stage, self.done))
        visible = self.columns[:window] <= position
        mask = torch.zeros(window, dtype=self.dtype, device=self.device).masked_fill_(~visible, torch.finfo(self.dtype).min)
        # Flash attention takes no mask, and cuDNN's plans are made anew for every window.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if self.device.type == "cuda" else nullcontext():
            output = self.model(
                input_ids=out.index_select(1, position).clamp_min(0),  # a row that has ended feeds anything
                attention_mask=mask.view(1, 1, 1, window),
                position_ids=position.view(1, 1).expand(rows, 1),
                past_key_values=self.cache,
                use_cache=True,
            )
        logits = output.logits[:, -1, : self.vocabulary]
        sampled, following = self._draw(logits), position + 1
        bad = (~logits.amax(-1).isfinite() & ~done).any()  # looked at now and then: the host does not wait for a step
        self.first_bad.copy_(torch.where(bad & (self.first_bad == EMPTY), following, self.first_bad))
        prompted = following < given  # [rows]: this token is part of the prompt
        forced = ~prompted & (stage >= 0) & (stage < self._answering)
        token = torch.where(forced, self.header[stage.clamp(0, len(self.header) - 1)], sampled)
        token = torch.where(prompted, out.index_select(1, following)[:, 0], token)
        turn_over = ~prompted & (stage == -1) & (token == self.end_of_turn)
        ended = ~prompted & ~forced & ~turn_over & (token[:, None] == self.stops).any(1)
        out.index_copy_(1, following, torch.where(done, EMPTY, token)[:, None])
        stage.copy_(torch.where(turn_over, 0, stage + forced))
        done.logical_or_(ended)
        position.add_(1)

    def _draw(self, logits: Tensor) -> Tensor:
        """A token per row by its probability: the largest of p / Exp(1), which needs neither sorting nor a look from the host."""
        probabilities = (logits.float() / self.temperature).softmax(-1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)

    def _squeeze(self, rows: int, fewer: int, step: int, finished: list[tuple[Tensor, Tensor]]) -> int:
        """Move the rows that are still going to the front and forget the cache of the others."""
        order = torch.argsort(self.done[:rows].to(torch.int8), stable=True)
        kept, dropped = order[:fewer], order[fewer:]
        finished.append((self.origin.index_select(0, dropped).cpu(), self.out.index_select(0, dropped).cpu()))
        for layer in self.layers:
            layer.squeeze(kept, step + 1)
        for state in (self.origin, self.out, self.given, self.stage, self.done):
            state[:fewer] = state.index_select(0, kept)
        return fewer
