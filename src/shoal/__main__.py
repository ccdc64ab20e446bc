"""The ``shoal`` command, as ``python -m shoal``."""

from .launch.cli import main

if __name__ == "__main__":
    main()
