#!/bin/sh
# Runs one stage of dvc.yaml, with the sources of this folder and the Python of the nearest .venv: that of this
# project, or of the project around it when DVC tries an experiment in a copy. `make setup` makes it.
set -eu
cd "$(dirname "$0")/.."
folder=$PWD
while [ ! -x "$folder/.venv/bin/python" ]; do
    if [ "$folder" = / ] || [ -z "$folder" ]; then
        echo "stage: expected .venv in $PWD or a folder above, found none: make it with 'make setup'" >&2
        exit 2
    fi
    folder=$(dirname "$folder")
done
# UTF-8 whatever the locale; modules from this folder and .venv alone.
unset PYTHONHOME PYTHONPATH PYTHONSAFEPATH
PYTHONUTF8=1 PYTHONNOUSERSITE=1 exec "$folder/.venv/bin/python" -m reproduce stage "$1"
