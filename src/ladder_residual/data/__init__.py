"""Training text: tokenised shards on disk (``shards``, ``writing``), rows for a training loop (``loader``), and what fills them:
files and hub datasets (``sources``, ``prepare``), or a model's own samples (``sample``).
"""
