#!/usr/bin/env bash
# Print the path of an interpreter of Python 3.12 or newer: $PYTHON if it is set, else the first one that is found
# on the PATH, under pyenv's versions folder, or through uv.
set -uo pipefail

# A name on the PATH proves nothing: a pyenv shim of a version that is not selected answers 127. So each candidate is
# run, and must have what a virtual environment needs (some distributions split ensurepip off).
usable() {
    "$1" -c 'import sys, venv, ensurepip
if sys.version_info < (3, 12): sys.exit(1)
print(sys.executable)' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && exit 0
    echo "error: PYTHON=$PYTHON does not run as Python 3.12 or newer with venv and ensurepip" >&2
    exit 1
fi

minors=(12 13 14 15 16 17 18 19)
for minor in "${minors[@]}"; do
    usable "python3.$minor" && exit 0
done
usable python3 && exit 0

for root in "${PYENV_ROOT:-}" ~/.pyenv; do
    [ -d "$root/versions" ] || continue
    for minor in "${minors[@]}"; do
        for candidate in "$root/versions/3.$minor".*/bin/python3 "$root/versions/3.$minor"/bin/python3; do
            usable "$candidate" && exit 0
        done
    done
done

if command -v uv >/dev/null 2>&1; then
    found=$(uv python find --no-project '>=3.12' 2>/dev/null) && usable "$found" && exit 0
    uv python install 3.12 >&2 && found=$(uv python find --no-project --managed-python 3.12) && usable "$found" && exit 0
fi

echo "error: no Python 3.12 or newer on the PATH, under pyenv or through uv: install one, or name it with PYTHON=/path/to/python" >&2
exit 1
