#!/usr/bin/env bash
# Install megaponder with the tested versions: docker/install.sh PYTHON EXTRAS [PIP OPTION ...]
# The CPU image and `make env` both do this, so that continuous integration runs the image's step in a clean environment.
set -euo pipefail
python=$1 extras=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"$python" -m pip install --disable-pip-version-check --quiet --constraint constraints.txt "$@" \
  torch==2.13.0 --editable ".[$extras]"
"$python" -m megaponder --version
