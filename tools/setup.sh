#!/bin/sh
# Makes .venv: exactly what requirements.lock lists, and this checkout installed into it. Does nothing when .venv is
# that already. PYTHON=... names the interpreter; otherwise an existing .venv keeps its own, and a new one gets the
# first that fits.
set -eu
cd "$(dirname "$0")/.."
# Whatever the user's locale and settings: names of files are UTF-8, and modules come from the interpreter alone.
export PYTHONUTF8=1 PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
unset PYTHONHOME PYTHONPATH

fits() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}

find_python() {
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if fits "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    echo "setup: expected Python 3.11 to 3.14 with its venv module (some systems package it apart, as" \
        "python3-venv); found none as python3, python3.14, python3.13, python3.12 or python3.11." \
        "Install one, or name one: make setup PYTHON=/path/to/python" >&2
    return 2
}

# What .venv is made from; a moved checkout needs a new one, because scripts in .venv name its path.
recipe() {
    cat requirements.lock pyproject.toml tools/setup.sh
    pwd -P
    "$1" -c 'import sys; print(sys.version, ascii(sys.base_prefix))'
}

# The interpreter behind .venv: the one inside cannot rebuild the folder it lives in.
base_of_venv() {
    .venv/bin/python -c 'import os, sys; sys.stdout.buffer.write(os.fsencode(os.path.realpath(sys.executable)))'
}

if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" || {
        echo "setup: expected PYTHON to name a Python 3.11 to 3.14 with its venv module, found '$PYTHON'" >&2
        exit 2
    }
    python=$PYTHON
elif fits .venv/bin/python; then
    python=$(base_of_venv)
else
    python=$(find_python)
fi

if [ -f .venv/recipe ] && recipe "$python" | cmp -s - .venv/recipe; then
    exit 0
fi

version=$("$python" -c 'import platform; print(platform.python_version())')
echo "setup: making .venv with Python $version; this takes a minute or two"
"$python" -m venv --clear .venv
pip() {
    .venv/bin/python -m pip --disable-pip-version-check "$@"
}
# setuptools first: it comes from the lock too, and builds what follows instead of one fetched unpinned.
sed -n '/^setuptools==/,/[^\\]$/p' requirements.lock >.venv/setuptools.lock
pip install --quiet --require-hashes --no-deps --only-binary :all: -r .venv/setuptools.lock
# antlr4-python3-runtime 4.9 (DVC needs it through hydra-core) was never published as a wheel; it is pure Python.
pip install --quiet --require-hashes --no-deps --only-binary :all: --no-binary antlr4-python3-runtime \
    --use-pep517 --no-build-isolation -r requirements.lock
# The checkout itself. Not as pip would (--editable): up to Python 3.12 a path file is read in the locale's encoding, so a
# folder with an accent in its name would be lost in some locales. A relative path is plain ASCII.
for site in .venv/lib/python3.*/site-packages; do
    echo ../../../.. >"$site/samebits.pth"
done
cat >.venv/bin/reproduce <<'END'
#!/bin/sh
'''exec' "$(dirname "$0")/python" "$0" "$@"
' '''
import sys

from reproduce.__main__ import start

if __name__ == "__main__":  # a process of --jobs loads this file too
    sys.exit(start())
END
chmod +x .venv/bin/reproduce
pip check
recipe "$python" >.venv/recipe.new
mv .venv/recipe.new .venv/recipe
