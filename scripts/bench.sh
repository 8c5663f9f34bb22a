#!/usr/bin/env bash
# Measure the whole system over HTTP; the last line is one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
exec .venv/bin/python -m bench "$@"
