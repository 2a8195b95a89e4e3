"""Training text, for ``train`` and ``adapt``.

Files and hub datasets (``sources``) hold documents and chats (``documents``). ``prepare`` tokenises them into a corpus of shards
(``corpus``, ``corpus_writer``) that ``corpus_rows`` serves to a training loop; ``encoder`` and ``packing`` make rows that know which
tokens are answers. ``sample`` lets a model write the text.
"""
