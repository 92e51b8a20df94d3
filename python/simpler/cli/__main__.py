"""``python -m simpler.cli``."""

from simpler.cli import main

if __name__ == "__main__":
    main()
