"""Write the tables of docs/serving.md from the planner and from results/serve.

python tools/serving_tables.py            # rewrite the page
python tools/serving_tables.py --check    # exit code 1 if that would change it
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from ladder_residual.bench import serve, vllm_one_rank

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "serving.md"
WRITERS = {"serve": serve.markdown_table, "vllm-tp1": vllm_one_rank.markdown_table}
LINKS = {
    "one-shot": "one-shot (NVLink, custom or fused all-reduce)",
    "nccl": "NCCL over NVLink",
    "nccl-no-p2p": "NCCL without peer-to-peer",
    "ib-2-nodes": "InfiniBand, two nodes",
    "10gbe": "10 Gb Ethernet",
}


def planned(page: str) -> str:
    """What the command that stands in the page says."""
    command = " ".join(re.search(r"`(ladder plan [^`]*)`", page)[1].split())
    words = [sys.executable, "-m", "ladder_residual", *shlex.split(command)[1:], "--json"]
    rows = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["rows"]
    lines = ["| link | batch | all-reduce | all layers | last half | no communication |", "|---|---|---|---|---|---|"]
    for row in rows:
        gains = " | ".join(f"{row['speedup'][wiring]:.2f}x" for wiring in ("ladder", "ladder:last-half", "no-comm"))
        lines.append(f"| {LINKS[row['link']]} | {row['batch']} | {row['allreduce_us']:.1f} us | {gains} |")
    return "\n".join(lines) + "\n"


def measured(path: str) -> str:
    result = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return WRITERS[result["benchmark"]](result)


def rewritten(page: str) -> str:
    def table(match: re.Match) -> str:
        return f"{match[1]}{planned(page) if match[2] == 'planned' else measured(match[2])}<!-- end -->"

    return re.sub(r"(<!-- table: (\S+) -->\n).*?<!-- end -->", table, page, flags=re.S)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    new = rewritten(page)
    if "--check" in sys.argv:
        sys.exit(f"{PAGE} is not what the planner and the results say: run python {sys.argv[0]}" if new != page else 0)
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
