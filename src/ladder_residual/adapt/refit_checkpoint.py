"""``refit`` of the Python API, and ``ladder convert SRC DST --wiring W --refit TEXT``: rewire a checkpoint, refit its projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.config import Wiring
from ..models.convert import Conversion, check_target, convert
from ..models.families import check_wiring
from ..models.preflight import CheckedSource, check_source
from .auto import Phases, full_rows
from .outcome import gap_closed

SEQUENCE = 512
CHECK_ROWS = 8  # of the text, held out
TOKENS = {"cpu": 30_720, "cuda": 262_144}


@dataclass(frozen=True)
class RefitResult:
    """What ``refit`` returns: the conversion, and mean losses per token on rows of the text that had no say in the fit."""

    conversion: Conversion
    tokens: int
    original: float
    converted: float
    refitted: float
    projections: int  # that were refitted

    @property
    def gap_closed(self) -> float | None:
        """Per cent of what the conversion costs; None if it costs nothing on this text."""
        return gap_closed(self.converted, self.refitted, self.original)

    def describe(self, write: Callable[[str], None]) -> None:
        write(f"refitted {self.projections} projections on {self.tokens:,} tokens")
        closed = "" if self.gap_closed is None else f", {self.gap_closed:.0f} % of the gap closed"
        write(
            f"loss     {self.original:.3f} original, {self.converted:.3f} converted, {self.refitted:.3f} refitted "
            f"(held-out rows of the text{closed})"
        )
        if self.refitted >= self.converted:
            write("         the refit does not help here: give more text, of the kind the model is for")


def check_refit(source: str | Path, target: str | Path, wiring: str | Wiring, overwrite: bool) -> tuple[CheckedSource, Wiring]:
    """ValueError before torch is imported."""
    found = check_source(source)
    if found.wiring.kind != "standard":
        raise ValueError(
            f"--refit needs the original beside it, and {source} is rewired already ({found.wiring.spec}): give the original"
        )
    after = Wiring.parse(wiring.spec if isinstance(wiring, Wiring) else wiring, found.wiring.num_layers)
    check_wiring(found.family, after)
    if after.kind != "ladder":
        raise ValueError(
            f"--refit is for ladder, whose modules read a stream that the original has too; {after.spec} is recovered with ladder adapt"
        )
    if found.adapter is not None:
        raise ValueError(f"{source} is an adapter: merge it into its base first (ladder convert {source} OUT)")
    if found.quantization is not None:
        raise ValueError(
            f"--refit changes weights, and those of {source} are quantised: refit the model they were quantised from"
        )
    if experts := found.fields.get("num_experts") or found.fields.get("num_local_experts"):
        raise ValueError(f"--refit has no rule for {experts} experts that see a part of the tokens each: use ladder adapt")
    check_target(source, target, overwrite)
    return found, after


def refit(
    source: str | Path,
    target: str | Path,
    wiring: str | Wiring,
    text: str | Path,
    *,
    tokens: int | None = None,
    device: str = "auto",
    overwrite: bool = False,
) -> RefitResult:
    """Convert a checkpoint to ladder and refit its projections in closed form, on a calibration text and without gradients.

    A converted module reads an older stream than it was trained on. Layer by layer, its input projections are fitted to give what
    the original's give, and its output projections to bring the stream back to the original's. It takes minutes on a CPU for 135M
    parameters. The model and its activations on the text (a few
    numbers per token and hidden unit) must fit in memory.

    Args:
        source: Checkpoint directory or hub id of the original, unconverted model.
        target: Directory to write. It appears whole or not at all.
        wiring: ``"ladder"``, ``"ladder:last-half"``, ``"ladder:16-31"`` ...
        text: File to fit on: ``.txt``, ``.jsonl``, a corpus directory, or a hub dataset ``owner/name``.
        tokens: Tokens of ``text`` to use. Default: 30720 on a CPU, 262144 on a GPU.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        overwrite: Replace a checkpoint that is there.

    Returns:
        The conversion, and the losses ``original``, ``converted`` and ``refitted`` on held-out rows of the text.

    Examples:
        >>> result = refit("stories", "stories-refitted", "ladder", "stories/stories.txt", tokens=4096)
        >>> result.original < result.refitted < result.converted
        True
    """
    found, after = check_refit(source, target, wiring, overwrite)
    import torch

    from ..data.encoder import Encoder
    from ..data.tokenizer import read_tokenizer
    from ..distributed.world import distributed
    from ..models.loading import load_model
    from .probe import Probe
    from .refit import HELD_OUT, Refit

    encoder = Encoder(read_tokenizer(str(source)), int(found.fields["vocab_size"]))
    sequence = min(SEQUENCE, int(found.fields.get("max_position_embeddings") or SEQUENCE))
    with distributed(device) as world:
        if world.size > 1:
            raise ValueError(f"one process refits, {world.size} were started")
        model: Any = load_model(source, world, dtype="fp32")
        widest = max(parameter.shape[-1] for name, parameter in model.named_parameters() if ".layers." in name)
        wanted = TOKENS[world.device.type] if tokens is None else tokens
        least = max(HELD_OUT, -(-widest // sequence))
        if wanted < least * sequence:
            raise ValueError(
                f"--refit-tokens {wanted} is too few: a projection reads {widest} numbers, so give at least {least * sequence}"
            )
        rows = torch.from_numpy(full_rows(str(text), encoder, sequence, -(-wanted // sequence) + CHECK_ROWS, 0))
        if len(rows) < least + CHECK_ROWS:
            raise ValueError(
                f"{text} gives {len(rows) * sequence} tokens in full rows of {sequence}: a projection reads {widest} numbers, so at "
                f"least {least * sequence} are needed and {CHECK_ROWS * sequence} to measure on; chats are padded, give documents"
            )
        fitted_on, check = rows[:-CHECK_ROWS], rows[-CHECK_ROWS:]
        before = Probe(model, check)
        original, converted = before.original.loss, before.cost(after.layers).loss
        del before
        with Phases(1)("refit", after.num_layers) as bar:
            changed = Refit(model, after, fitted_on, getattr(torch, found.dtype)).run(bar.update)
        refitted = Probe(model, check).cost(after.layers).loss
    conversion = convert(source, target, after, overwrite=overwrite, refitted=changed)
    return RefitResult(conversion, fitted_on.numel(), original, converted, refitted, len(changed))
