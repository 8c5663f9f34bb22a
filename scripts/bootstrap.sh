#!/usr/bin/env bash
# Create .venv and install Headrace into it, unless the stamp says that this very set is installed already.
# Usage: scripts/bootstrap.sh [dev]
set -euo pipefail
cd "$(dirname "$0")/.."
extra="${1:-}"

python="${PYTHON:-}"
if [ -z "$python" ]; then
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            python="$candidate"
            break
        fi
    done
fi

stamp_of() { { cat pyproject.toml constraints.txt && printf '%s %s' "$PWD" "$1"; } | sha256sum | cut -d' ' -f1; }

installed() {
    [ -x .venv/bin/python ] && [ -f ".venv/.headrace-stamp-$1" ] &&
        [ "$(cat ".venv/.headrace-stamp-$1")" = "$(stamp_of "$1")" ]
}

# What carries the developers' tools carries everything else.
if installed dev || { [ -z "$extra" ] && installed base; }; then exit 0; fi

if [ ! -x .venv/bin/python ]; then
    if [ -z "$python" ]; then
        echo "Headrace needs Python 3.11 or newer; none found. Set PYTHON=/path/to/python3." >&2
        exit 1
    fi
    echo "==> creating .venv with $($python --version)"
    "$python" -m venv .venv
fi

target="."
name="base"
if [ "$extra" = dev ]; then target=".[dev]" name="dev"; fi
echo "==> installing Headrace and its pinned dependencies (once; about a minute)"
rm -f .venv/.headrace-stamp-*
quiet="--quiet"
if [ -t 1 ]; then quiet=""; fi
# shellcheck disable=SC2086
.venv/bin/python -m pip install $quiet --disable-pip-version-check --progress-bar "$([ -t 1 ] && echo on || echo off)" \
    -c constraints.txt -e "$target"
echo "==> compiling the CPU kernels"
if ! .venv/bin/python -c 'import sys; from kernels.native.build import find_compiler; sys.exit(find_compiler() is None)'; then
    echo "    no C++ compiler on this machine: installing one into .venv"
    .venv/bin/python -m pip install $quiet --disable-pip-version-check -c constraints.txt ziglang || true
fi
.venv/bin/python -m kernels.native || echo "    going on with the kernels in torch, which are slower"
stamp_of "$name" >".venv/.headrace-stamp-$name"
echo "==> installed"
