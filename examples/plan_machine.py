"""What would ladder gain on your machine? Needs no GPU and imports no torch.

python examples/plan_machine.py [MODEL [DEVICE]]
"""

import sys

import ladder_residual as ladder

model, device = [*sys.argv[1:], *["llama-3-70b", "h100"][len(sys.argv) - 1 :]]
for row in ladder.plan(model, device=device, tp=[4, 8], link=["nccl", "one-shot"]):
    print(row.advice)
    print("  " + ", ".join(f"{wiring} {speedup:.2f}x" for wiring, speedup in row.speedup.items()))
