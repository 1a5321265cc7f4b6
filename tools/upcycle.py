#!/usr/bin/env python3
"""Dense models to a mixture of experts and back: the same as `megaponder upcycle`."""

import sys

from megaponder.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["upcycle", *sys.argv[1:]]))
