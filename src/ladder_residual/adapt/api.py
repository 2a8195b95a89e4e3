"""``select_layers`` and ``adapt`` of the Python API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .auto import Request, choose, explain, save
from .preflight import check_settings
from .settings import AdaptSettings, DataSource, Method, check_installed, from_mapping

if TYPE_CHECKING:
    from .run import Result


@dataclass(frozen=True)
class LayerSelection:
    """What ``select_layers`` returns.

    Attributes:
        wiring: The spec string for ``convert`` or ``rewire``, such as ``"ladder:2,4"``.
        layers: The layers it converts.
        document: Everything that was measured: costs of single layers, the chosen set of each size, curves on both texts.
    """

    wiring: str
    layers: tuple[int, ...]
    document: dict[str, Any]

    def explain(self, write: Callable[[str], None] = print) -> None:
        """Say in a few lines which layers were chosen and why."""
        explain(self.document, write)

    def save(self, target: str | Path, write: Callable[[str], None] = print) -> None:
        """Write ``selection.json`` and its plot into the converted checkpoint ``target``."""
        save(self.document, Path(target), write)


def select_layers(
    source: str | Path,
    text: str | Path,
    *,
    layers: int | None = None,
    budget: float | None = None,
    check: str | Path | None = None,
    tokens: int | None = None,
    refit: str | Path | None = None,
    refit_tokens: int | None = None,
    device: str = "auto",
) -> LayerSelection:
    """Choose the layers whose conversion to ladder costs least, on a calibration text.

    Every layer is converted alone, then sets grow layer by layer. The last k layers are always among the candidates. The choice is
    checked on text that had no say in it. It takes seconds on a GPU and minutes on a CPU, before any training.

    Args:
        source: Checkpoint directory or hub id of the original, unconverted model.
        text: File to choose on: ``.txt``, ``.jsonl``, a corpus directory, or a hub dataset ``owner/name``.
        layers: How many layers to convert. Give either this or ``budget``.
        budget: By how many nats the loss may rise before any recovery training.
        check: Another text to check the choice on. Default: the rest of ``text``.
        tokens: Tokens of ``text`` to use. Default: 2048 on a CPU, 65536 on a GPU.
        refit: Text to refit every layer on first, alone: its cost is then that after a refit. It takes as long as a refit of all.
        refit_tokens: Tokens of it to use, as in ``refit``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Returns:
        The wiring, its layers, and the measurements behind them.

    Examples:
        >>> selection = select_layers("stories", "stories/stories.txt", layers=2, tokens=1024)
        >>> len(selection.layers)
        2
        >>> convert("stories", "stories-chosen", selection.wiring).after.spec == selection.wiring
        True
    """
    named = {name: str(path) for name, path in (("check", check), ("refit", refit)) if path is not None}
    request = Request(str(text), layers, budget, tokens=tokens, refit_tokens=refit_tokens, **named)
    wiring, document = choose(str(source), request, device)
    return LayerSelection(wiring, tuple(document["layers"]), document)


def adapt(
    student: str | Path,
    *,
    teacher: str | Path | None = None,
    data: str | Path | Sequence[str | Path] | Mapping[str, float],
    heldout: str | Path | Sequence[str | Path] = (),
    out: str | Path | None = None,
    method: Method = "distill",
    tokens: int | None = None,
    sequence: int | None = None,
    batch_tokens: int | None = None,
    learning_rate: float | None = None,
    device: str = "auto",
    log: Callable[[str], None] = print,
    **settings: Any,
) -> Result:
    """Recover a converted model: distil the original into it, or train it on text.

    Runs in this process, or on the ranks that torchrun started (DDP or FSDP2): every rank calls it with the same arguments. An
    interrupted run goes on from its last checkpoint when it is called again.

    Args:
        student: Converted checkpoint: directory or hub id.
        teacher: The original model; ``method="sft"`` does without.
        data: Text to learn from: ``.txt``, ``.jsonl``, a corpus directory or a hub dataset. Several as a list, or as a dict with
            the share of each.
        heldout: Text to measure on, never trained on. Default: 5 % of the rows of ``data`` are kept back.
        out: Directory for the result. Default: the student's name with ``-recovered``.
        method: ``"distill"``, ``"sft"`` (the text's own next tokens) or ``"lora"``.
        tokens: How many tokens to train on. Default: one epoch of the data.
        sequence: Tokens of a row. Default: 1024, or the context of a student that has less.
        batch_tokens: Tokens of an optimizer step, over all ranks. Default: 32768.
        learning_rate: Peak of the schedule. Default: 3e-4.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        log: Called with each line of progress, on rank 0.
        **settings: Further fields of ``AdaptSettings``, such as ``epochs``, ``schedule``, ``precision``, ``seed`` or ``save_every``.

    Returns:
        The run: where its checkpoint is (``output``), steps, tokens, seconds, and the held-out losses ``before`` and ``after``.

    Examples:
        >>> result = adapt("stories-ladder", teacher="stories", data="stories/stories.txt", out="stories-recovered",
        ...                tokens=4096, sequence=128, batch_tokens=1024, log=lambda line: None)
        >>> result.steps, result.output.name
        (4, 'stories-recovered')
    """
    check_installed()
    given: dict[str, Any] = {"teacher": teacher, "out": out, "tokens": tokens, "sequence": sequence}
    given |= {"batch_tokens": batch_tokens, "learning_rate": learning_rate}
    named = {name: str(value) if isinstance(value, Path) else value for name, value in given.items() if value is not None}
    chosen: AdaptSettings = from_mapping(
        {
            "student": str(student),
            "method": method,
            "data": [DataSource(path, weight) for path, weight in _weighted(data).items()],
            "heldout": tuple(_paths(heldout)),
            **named,
            **settings,
        },
        "adapt",
    )
    check_settings(chosen)
    from ..distributed.world import distributed
    from .run import adapt as run

    with distributed(device) as world:
        return run(chosen, world, log)


def _paths(sources: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(sources)] if isinstance(sources, str | Path) else [str(source) for source in sources]


def _weighted(data: str | Path | Sequence[str | Path] | Mapping[str, float]) -> dict[str, float]:
    return dict(data) if isinstance(data, Mapping) else dict.fromkeys(_paths(data), 1.0)
