"""What a model can do: lm-evaluation-harness tasks and perplexity, on any number of ranks, with or without the harness at hand.

``score.py`` needs torch alone. ``requests.py`` is the file between it and the harness, so that a machine with a GPU and nothing
else can do the computing.
"""
