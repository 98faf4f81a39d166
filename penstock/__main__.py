"""``python -m penstock``, the same as ``penstock``."""

from penstock.command import main

if __name__ == "__main__":
    main()
