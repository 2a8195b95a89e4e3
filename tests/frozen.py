"""Imported last by the server that ranks are forked from: what it holds by then is left out of their garbage collections, which would
also copy its pages."""

import gc

gc.freeze()
