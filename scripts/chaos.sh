#!/usr/bin/env bash
# Kill and freeze real processes under running streams; the last line is one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
if [ "$#" -eq 0 ]; then set -- run failover; fi
exec .venv/bin/python -m chaos "$@"
