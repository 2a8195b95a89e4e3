"""Fuzzing: broken and hostile input of every kind the package reads, in processes of their own."""
