#!/usr/bin/env python3
"""Whether models come from each other: the same as `megaponder lineage`."""

import sys

from megaponder.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["lineage", *sys.argv[1:]]))
