#!/bin/sh
# Creates .venv-peers with the compared frameworks (TRL, verl, OpenRLHF): infra/install_peers.sh [PYTHON].
# A second run installs nothing. Their pins contradict rlcore's and each other's; verl, OpenRLHF and Liger come
# without their dependencies.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$here/../.venv-peers wanted=$here/../benchmarks/peers/requirements.txt pins=$here/peers-constraints.txt
stamp=$folder/.installed
[ -e "$stamp" ] && [ "$stamp" -nt "$0" ] && [ "$stamp" -nt "$wanted" ] && [ "$stamp" -nt "$pins" ] && exit 0

"${1:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
torch=$(grep '^torch==' "$pins")
pip "$torch"
pip --constraint "$pins" --requirement "$wanted" "$torch"
pip --no-deps --constraint "$pins" verl openrlhf liger-kernel
rm -rf "$folder"/lib/python*/site-packages/tests  # verl's, which would hide those of this project
touch "$stamp"
