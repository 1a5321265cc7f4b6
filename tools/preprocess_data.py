#!/usr/bin/env python3
"""Text to indexed dataset: the same as `megaponder prepare`."""

import sys

from megaponder.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["prepare", *sys.argv[1:]]))
