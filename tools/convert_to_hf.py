#!/usr/bin/env python3
"""Checkpoint to Hugging Face folder: the same as `megaponder export`."""

import sys

from megaponder.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
