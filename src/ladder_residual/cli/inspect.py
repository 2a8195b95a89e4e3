"""``ladder inspect``."""

from __future__ import annotations

import json

from ..common.terminal import show
from .options import Json, Source


def inspect(source: Source, as_json: Json = False) -> None:
    """Family, wiring layer by layer, size, and memory per rank."""
    from ..models.inspect import inspect_checkpoint

    result = inspect_checkpoint(source)
    if as_json:
        print(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"family      {result['family']}")
    console.print(f"wiring      {result['wiring']}")
    console.print(f"layers      {result['picture']}  (| standard, # rewired; layer 0 at the left)")
    console.print(f"parameters  {result['parameters']:,} in {result['dtype']}")
    if adapter := result["adapter"]:
        console.print(f"adapter     LoRA of rank {adapter['rank']} for {adapter['base']}")
    sizes = {"weights per rank": "weight_bytes"}
    if quantised := result["quantization"]:
        console.print(f"quantised   {quantised['description']}")
        sizes = {"weights per rank": "stored_bytes", "dequantised": "weight_bytes"}
    table = Table("tp", *sizes, "KV cache per token and rank")
    refused: dict[str, list[str]] = {}
    for tp, row in result["ranks"].items():
        if "refused" in row:
            refused.setdefault(row["refused"].removeprefix(f"tp={tp} "), []).append(str(tp))
        else:
            memory = (f"{row[key] / 2**20:,.1f} MiB" for key in sizes.values())
            table.add_row(str(tp), *memory, f"{row['kv_bytes_per_token'] / 2**10:,.1f} KiB")
    console.print(table)
    for why, ranks in refused.items():
        show(f"not tp {', '.join(ranks)}: {why}")
