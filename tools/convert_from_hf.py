#!/usr/bin/env python3
"""Hugging Face folder to checkpoint: the same as `megaponder import`."""

import sys

from megaponder.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["import", *sys.argv[1:]]))
