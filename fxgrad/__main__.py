"""``python -m fxgrad``: see `fxgrad.command_line`."""

import sys

import fxgrad
from fxgrad.command_line.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], fxgrad.__version__))
