"""Training from scratch: a recipe, a loop on FSDP2 x tensor parallelism, checkpoints that survive anything."""
