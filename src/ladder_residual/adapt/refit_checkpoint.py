"""``refit`` of the Python API, and ``ladder convert SRC DST --wiring W --refit TEXT``: rewire a checkpoint, refit its projections, and
round them if they are to be quantised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import Wiring
from ..models.convert import Conversion, check_target, convert
from ..models.families import check_wiring
from ..models.preflight import CheckedSource, check_source
from ..models.quantization.write import checked_format
from .auto import Phases, full_rows
from .outcome import gap_closed

if TYPE_CHECKING:
    from torch import Tensor

    from ..distributed.world import World
    from ..models.quantization.rounding import Format

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
    singular: int = 0  # modules for which a ridge had to be raised

    @property
    def gap_closed(self) -> float | None:
        """Per cent of what the conversion costs; None if it costs nothing on this text."""
        return gap_closed(self.converted, self.refitted, self.original)

    def describe(self, write: Callable[[str], None]) -> None:
        to = f" and rounded them to {self.conversion.format}" if self.conversion.format else ""
        write(f"refitted {self.projections} projections on {self.tokens:,} tokens{to}")
        standard = self.conversion.after.kind == "standard"
        closed = "" if self.gap_closed is None else f", {self.gap_closed:.0f} % of the gap closed"
        write(
            f"loss     {self.original:.3f} original, "
            + (
                f"{self.refitted:.3f} quantised"
                if standard
                else f"{self.converted:.3f} converted, {self.refitted:.3f} refitted"
            )
            + f" (held-out rows of the text{closed})"
        )
        if self.singular:
            write(
                f"         what {self.singular} modules read on this text is singular: their ridge was raised; more text, or of "
                f"more kinds, is the cure"
            )
        if self.refitted >= self.converted and not standard:
            write("         the refit does not help here: give more text, of the kind the model is for")


def check_refit(
    source: str | Path, target: str | Path, wiring: str | Wiring | None, overwrite: bool, quantize: str | None = None
) -> tuple[CheckedSource, Wiring, Format | None]:
    """ValueError before torch is imported."""
    wiring = "standard" if wiring is None else wiring
    found = check_source(source)
    if found.wiring.kind != "standard":
        raise ValueError(
            f"--refit needs the original beside it, and {source} is rewired already ({found.wiring.spec}): give the original"
        )
    after = Wiring.parse(wiring.spec if isinstance(wiring, Wiring) else wiring, found.wiring.num_layers)
    check_wiring(found.family, after)
    if after.kind == "standard" and quantize is None:
        raise ValueError(
            "--refit changes nothing in a standard model: give --wiring ladder ..., --quantize fp8 or int4, or both"
        )
    if after.kind not in ("ladder", "standard"):
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
    format = checked_format(found, quantize) if quantize is not None else None
    check_target(source, target, overwrite)
    return found, after, format


def calibration(found: CheckedSource, text: str | Path, tokens: int | None, world: World) -> tuple[Tensor, Tensor]:
    """Rows to fit on, and further rows of the text to measure on."""
    import torch

    from ..data.encoder import Encoder
    from ..data.tokenizer import read_tokenizer
    from ..models.loading import meta_model
    from .least_squares import HELD_OUT

    encoder = Encoder(read_tokenizer(str(found.checkpoint.directory)), int(found.fields["vocab_size"]))
    sequence = min(SEQUENCE, int(found.fields.get("max_position_embeddings") or SEQUENCE))
    widest = max(parameter.shape[-1] for name, parameter in meta_model(found).named_parameters() if ".layers." in name)
    least = max(HELD_OUT, -(-widest // sequence))
    wanted = TOKENS[world.device.type] if tokens is None else tokens
    if wanted < least * sequence:
        raise ValueError(
            f"--refit-tokens {wanted} is too few: a projection reads {widest} numbers, so give at least {least * sequence}"
        )
    rows = full_rows(str(text), encoder, sequence, -(-wanted // sequence) + CHECK_ROWS, 0)
    if len(rows) < least + CHECK_ROWS:
        raise ValueError(
            f"{text} gives {len(rows) * sequence} tokens in full rows of {sequence}: a projection reads {widest} numbers, so at least "
            f"{least * sequence} are needed and {CHECK_ROWS * sequence} to measure on; give documents rather than chats, whose rows "
            f"are padded"
        )
    both = torch.from_numpy(rows)
    return both[:-CHECK_ROWS], both[-CHECK_ROWS:]


def refit(
    source: str | Path,
    target: str | Path,
    wiring: str | Wiring | None,
    text: str | Path,
    *,
    quantize: str | None = None,
    tokens: int | None = None,
    device: str = "auto",
    overwrite: bool = False,
    log: Callable[[str], None] = print,
) -> RefitResult:
    """Convert a checkpoint to ladder and refit its projections in closed form, on a calibration text and without gradients.

    A converted module reads an older stream than it was trained on. Layer by layer, its input projections are fitted to give what
    the original's give, and its output projections to bring the stream back to the original's. It takes minutes on a CPU for 135M
    parameters. The model and its activations on the text (a few numbers per token and hidden unit) must fit in memory.

    With ``quantize`` each projection is then rounded column by column, so that the columns and layers after it make up for what is
    lost (GPTQ). Far less is lost than by rounding to the nearest number.

    Runs in this process, or on the tensor-parallel ranks that torchrun started. Finished layers are kept in ``TARGET.refit`` until the
    checkpoint is written: called again, an interrupted refit goes on with the next layer.

    Args:
        source: Checkpoint directory or hub id of the original, unconverted model.
        target: Directory to write. It appears whole or not at all.
        wiring: ``"ladder"``, ``"ladder:last-half"``, ``"ladder:16-31"`` ...; None with ``quantize``: it stays standard.
        text: File to fit on: ``.txt``, ``.jsonl``, a corpus directory, or a hub dataset ``owner/name``.
        quantize: ``"fp8"`` or ``"int4"``, as ``convert`` writes them; by one process.
        tokens: Tokens of ``text`` to use. Default: 30720 on a CPU, 262144 on a GPU.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        overwrite: Replace a checkpoint that is there.
        log: Called with what is worth knowing on the way, on rank 0.

    Returns:
        The conversion, and the losses ``original``, ``converted`` and ``refitted`` on held-out rows of the text.

    Examples:
        >>> result = refit("stories", "stories-refitted", "ladder", "stories/stories.txt", tokens=4096)
        >>> result.original < result.refitted < result.converted
        True
    """
    found, after, format = check_refit(source, target, wiring, overwrite, quantize)
    import torch

    from ..common.version import __version__
    from ..distributed.world import distributed
    from ..models.loading import load_model
    from ..models.parameters import stored_tensors
    from ..train.run_lock import run_lock
    from .refit import Refit
    from .refit_layers import LayerStore
    from .select import silent

    folder = Path(target).resolve().with_name(f"{Path(target).resolve().name}.refit")
    with distributed(device) as world, ExitStack() as held:
        if format is not None and world.size > 1:
            raise ValueError(f"--quantize with --refit takes one process, and {world.size} were started: leave out --tp")
        log = log if world.is_main else (lambda line: None)
        rows, check = calibration(found, text, tokens, world)
        digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
        world.check_same("the calibration text", digest)
        held.enter_context(run_lock(folder, world))
        config = json.dumps(found.fields, sort_keys=True, default=str)
        weights = f"{found.checkpoint.digest()} {hashlib.sha256(config.encode()).hexdigest()}"
        about = {"checkpoint": weights, "dtype": found.dtype, "wiring": after.spec, "text": digest, "ranks": world.size}
        about["format"] = format and format.describe()
        layers = LayerStore(folder, about | {"version": __version__}, world, log)
        model: Any = load_model(source, world, dtype="fp32")
        original, converted = (mean_loss(model, spec, check) for spec in ("standard", after.spec))
        with (Phases(1) if world.is_main else silent)("refit", after.num_layers) as bar:
            fitted = Refit(model, after, rows, getattr(torch, found.dtype), format=format)
            fitted.run(layers, bar.update)
        refitted = mean_loss(model, after.spec, check)
        whole = fitted.whole(layers, lambda name: found.checkpoint.read(stored_tensors(found.checkpoint, name, ())[0][0]))
        conversion: Any = world.main_first(
            lambda: (
                convert(source, target, after, overwrite=overwrite, quantize=quantize, refitted=whole)
                if world.is_main
                else None
            )
        )
        layers.remove()
        conversion = world.broadcast(conversion)
    return RefitResult(conversion, rows.numel(), original, converted, refitted, len(fitted.changed), len(fitted.singular))


def mean_loss(model: Any, wiring: str, rows: Tensor) -> float:
    """Per token, of the model with another wiring."""
    import torch
    from torch.nn.functional import cross_entropy

    from ..models.hf import rewire

    rewire(model, wiring)
    total = 0.0
    with torch.no_grad():
        for ids in rows.to(model.device).split(1):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            total += float(cross_entropy(logits, ids[0, 1:]))
    return total / len(rows)
