"""``python -m holdfast`` is the ``holdfast`` command."""

from .cli import main

if __name__ == "__main__":
    main()
