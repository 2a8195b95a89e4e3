"""What a GPU session adds to the page about real ranks."""

from lab.reports import real_ranks
from lab.reports.sources import read_results

WHERE = {"gpu": "A card", "commit": "abc", "date": "2026-01-01"}


def test_logits_and_losses_have_a_section_once_there_are_some():
    engine, train = read_results("engine"), read_results("train")
    for name in [name for name in engine if name.startswith("real-logits-")]:
        del engine[name]
    train.pop("train-losses", None)
    assert "## Against one process" not in real_ranks.render(engine, train)

    engine |= {
        f"real-logits-tp{ranks}": {"ranks": ranks, "compared": 80, "of": 90, "worst_relative_error": 0.0058, **WHERE}
        for ranks in (8, 4)
    }
    found = {"precision": "fp32", "compiled": True, "largest_relative_difference": {"tp 2": 9e-7}}
    failed = {"precision": "bf16", "compiled": False, "message": "tp 2: no NCCL"}
    page = real_ranks.render(engine, train | {"train-losses": {"rows": [found, failed], **WHERE}})
    section = page.partition("## Against one process")[2]
    assert section.index("| logits, TP=4 | 80 of 90 cases | 0.0058 |") < section.index("| logits, TP=8 |")
    assert "| losses, fp32, compiled | tp 2 | 9.0e-07 |" in section
    assert "| losses, bf16 |  | failed |" in section
