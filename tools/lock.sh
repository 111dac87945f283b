#!/bin/sh
# Resolves requirements.lock anew from pyproject.toml: one version of everything for every Python and platform where
# that is possible, hashes for all, and nothing about the index that was asked. UPGRADE=1 moves to the newest versions;
# without it, versions already locked stay.
set -eu
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -I -m pip install --quiet --disable-pip-version-check --only-binary :all: uv==0.13.9
[ -n "${UPGRADE:-}" ] || cp requirements.lock "$scratch/requirements.lock"
"$scratch/venv/bin/uv" pip compile --quiet --no-config --system-certs --universal --python-version 3.11 \
    --fork-strategy fewest --generate-hashes --only-binary :all: --no-binary antlr4-python3-runtime \
    --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
    --extra test --group build --output-file "$scratch/requirements.lock" pyproject.toml >/dev/null
if grep -nE '://|^-|^ *#' "$scratch/requirements.lock"; then
    echo "lock: expected only pinned names and hashes, found the lines above; requirements.lock is left as it was" >&2
    exit 1
fi
mv "$scratch/requirements.lock" requirements.lock
