#!/usr/bin/env bash
# Install megaponder with the tested versions: docker/install.sh PYTHON EXTRAS [PIP OPTION ...]
# The CPU image and `make env` both do this, so that continuous integration runs the image's step in a clean environment.
set -euo pipefail
python=$1 extras=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pip=("$python" -m pip --disable-pip-version-check --quiet install)
torch=torch==2.13.0
rest() { # constraints.txt has all packages of `dev` and no others
  "${pip[@]}" --no-deps "$@" --requirement <(grep --invert-match '^torch==' constraints.txt) 'setuptools>=77'
  "${pip[@]}" --no-deps "$@" --no-build-isolation --editable .
}
if [ "$extras" = dev ]; then # one core unpacks PyTorch, half of it all, another the rest
  "${pip[@]}" --no-deps "$@" "$torch" &
  rest "$@" || { kill $!; exit 1; }
  wait $!
fi
if [ "$extras" != dev ] || ! "$python" -m pip check; then
  "${pip[@]}" --constraint constraints.txt "$@" "$torch" --editable ".[$extras]"
fi
"$python" -m megaponder --version
