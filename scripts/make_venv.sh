#!/usr/bin/env bash
# make_venv.sh VENV LOCK: create or update the virtual environment VENV from LOCK, with this project editable in it.
set -euo pipefail
venv=$1
lock=$2
cd "$(dirname "$0")/.."

# The stamp goes first, so that an interrupted update is not taken for a finished one.
rm -f "$venv/.installed"
if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    python=$(bash scripts/find_python.sh)
    echo "creating $venv with $python"
    "$python" -m venv --clear "$venv"
fi
echo "installing $(grep -c '==' "$lock") pinned packages from $lock into $venv (the first time takes a minute or more)"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --requirement "$lock"
# The build backend is one of the pinned packages: no isolated build that would fetch another one.
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
touch "$venv/.installed"
