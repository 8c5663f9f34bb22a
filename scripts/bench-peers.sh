#!/usr/bin/env bash
# Compare the whole system with other servers; the last line is one JSON object. They are installed on the first run.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
scripts/peers.sh
exec .venv/bin/python -m bench.peers "$@"
