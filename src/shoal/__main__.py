"""``python -m shoal`` is the ``shoal`` command."""

from .launch.cli import main

if __name__ == "__main__":
    main()
