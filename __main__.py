"""``python -m holdfast`` is the ``holdfast`` command."""

from .cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
