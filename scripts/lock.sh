#!/usr/bin/env bash
# lock.sh JAX_VERSION: resolve the lock files anew, for every platform and Python, with hashes and without any address
# of an index, so that plain pip installs them from whichever index it is configured for.
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
compile requirements.lock --extra server --extra kv-events --group build --group test --group train --group clients
for cuda in 12 13; do
    compile "requirements-cuda$cuda.lock" --extra "cuda$cuda" --group build --group test
done
compile requirements-ray.lock --extra server --extra ray --group build --group test
compile requirements-tunix.lock --group build --group test --group tunix
# The site, clients and routers need nothing of the engine's environment.
for group in docs commands router; do
    .venv-lock/bin/uv pip compile --quiet --no-config --upgrade --universal --python-version 3.12 --generate-hashes \
        --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
        --output-file "requirements-$group.lock" --group "$group"
done
# Only what is compared with, and no hashes: builds of torch for other devices are as good.
.venv-lock/bin/uv pip compile --quiet --no-config --upgrade --no-deps --python-version 3.12 --no-emit-index-url \
    --no-emit-find-links --no-annotate --no-header --output-file requirements-parity.lock --group parity
