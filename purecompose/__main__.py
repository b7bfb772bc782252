"""`python -m purecompose`: see `purecompose.cli`."""

import sys

from purecompose.cli import main


if __name__ == "__main__":
    sys.exit(main())
