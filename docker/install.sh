#!/usr/bin/env bash
# Install megaponder with the tested versions: docker/install.sh PYTHON EXTRAS [PIP OPTION ...]
# The CPU image and `make env` both do this, so that continuous integration runs the image's step in a clean environment.
set -euo pipefail
python=$1 extras=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pip=("$python" -m pip --disable-pip-version-check --quiet install)
torch=torch==2.13.0
# constraints.txt has all packages of `dev` and no others.  uv unpacks them in a tenth of pip's time; where it cannot get
# them (it reads no settings of pip but the index that is named here), pip does it.
rest() {
  local index versions
  index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}
  versions=$(grep --invert-match '^torch==' constraints.txt)
  "${pip[@]}" --no-deps "$@" "$(grep '^uv==' <<<"$versions")"
  UV_HTTP_TIMEOUT=20 "$python" -m uv pip install --quiet --system-certs --python "$python" --no-deps \
    --default-index "$index" --requirement - 'setuptools>=77' <<<"$versions" ||
    "${pip[@]}" --no-deps "$@" --requirement <(echo "$versions") 'setuptools>=77'
  "${pip[@]}" --no-deps "$@" --no-build-isolation --editable .
}
if [ "$extras" = dev ]; then # pip unpacks PyTorch meanwhile
  "${pip[@]}" --no-deps "$@" "$torch" &
  rest "$@" || { kill $!; exit 1; }
  wait $!
fi
if [ "$extras" != dev ] || ! "$python" -m pip check; then
  "${pip[@]}" --constraint constraints.txt "$@" "$torch" --editable ".[$extras]"
fi
"$python" -m megaponder --version
