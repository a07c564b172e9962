#!/usr/bin/env bash
# lock.sh JAX_VERSION: resolve both lock files anew, for every platform and Python, with hashes and without any
# address of an index, so that plain pip installs them from whichever index it is configured for.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
    local lock=$1
    shift
    echo "jax==$jax" | .venv-lock/bin/uv pip compile --quiet --no-config --upgrade --universal --python-version 3.12 \
        --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
        --output-file "$lock" "$@" pyproject.toml -
}

jax=$1
compile requirements.lock --group build --group test --group train
compile requirements-cuda13.lock --extra cuda13 --group build --group test
