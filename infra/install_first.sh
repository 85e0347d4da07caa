#!/bin/sh
# Installs uv and torch: infra/install_first.sh PYTHON. torch's build is the one that pip chooses, such as a CPU wheel that
# is configured for pip, if its hash is in locks/first.txt; in one step pip would prefer PyPI's, whose hash it knows.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=$1 lock=$here/locks/first.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pip() { "$python" -m pip "$@" --quiet --disable-pip-version-check --no-deps; }
pip download --dest "$folder" $(sed -n 's/^\([a-z]*==[^ ]*\).*/\1/p' "$lock")
pip install --no-index --find-links "$folder" --require-hashes --requirement "$lock" || {
  echo "pip chose another build than those of $lock; to take it, add the hash that pip names above" >&2
  exit 1
}
