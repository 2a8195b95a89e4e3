#!/usr/bin/env bash
# Install the lowest versions that pyproject.toml claims and run a smoke suite with them.
#   lab/test-lowest.sh [DIRECTORY]      default .venv-lowest; PYTHON chooses the interpreter (3.11 or newer)
#   TORCH=2.13.0+cpu lab/test-lowest.sh    that torch and the lowest of the rest: older ones may be had with CUDA only, gigabytes of it
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
target=${1:-$root/.venv-lowest}
cd "$root"
[[ -x $target/bin/python ]] || "${PYTHON:-python3}" -m venv "$target"
lowest=$(sed -n '/^dependencies/,/^]/p' pyproject.toml | sed -nE 's/^ *"([A-Za-z_]+)>=([0-9.]+).*/\1==\2/p' | sed -E 's/==([0-9]+\.[0-9]+)$/==\1.*/; s/==([0-9]+)$/==\1.*/')
[[ -z ${TORCH:-} ]] || lowest=$(sed "s/^torch==.*/torch==$TORCH/" <<<"$lowest")
# shellcheck disable=SC2086  # one word per package
"$target/bin/python" -m pip install --quiet --disable-pip-version-check $lowest pytest hypothesis 'setuptools>=77'
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
"$target/bin/python" -m pip list --disable-pip-version-check | grep -iE '^(torch|transformers|safetensors|huggingface_hub|numpy|typer|rich) '
"$target/bin/ladder" demo
"$target/bin/python" -m pytest -q tests/core tests/common tests/links tests/plan tests/models tests/distributed tests/generation
