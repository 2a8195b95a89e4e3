"""``python -m ladder_residual`` is ``ladder``; under torchrun every rank runs it."""

from .cli.main import main

if __name__ == "__main__":
    main()
