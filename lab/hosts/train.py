"""``ladder bench train`` between two hosts on this machine (network namespaces, needs root); its options are handed on.

python -m lab.hosts.train --link 1ms/1gbit --model ladder-1b --layers 4
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.hosts.links import NetworkShape
from lab.output import finish
from ladder_residual.distributed.launch import run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    link: Annotated[str, typer.Option(help="Delay of one direction and rate, e.g. 1ms or 1ms/1gbit.")] = "1ms",
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well.")] = None,
) -> None:
    """`ladder bench train` between two hosts; further options are handed on to it."""
    from lab.hosts.delayed_link import DelayedLink
    from lab.hosts.namespaces import measure_link, run_on_hosts

    chosen = NetworkShape.parse(link)
    options = ["--links", "none", "--device", "cpu", "--tp", "2"]
    with DelayedLink(chosen.seconds, chosen.rate, 2) as hosts:
        facts = measure_link(hosts)
        result = run_on_hosts(hosts, ["-m", "ladder_residual", "bench", "train", *context.args, *options], 1800.0)
    for row in result["rows"]:
        row["link"] = f"two hosts, {chosen.name}"
    finish({**result, "wire": chosen.name, **facts}, out)


if __name__ == "__main__":
    run_command(app)
