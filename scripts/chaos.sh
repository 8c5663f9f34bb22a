#!/usr/bin/env bash
# Kill and freeze real processes under running streams, with `storm` do so in virtual time, with `kv` hurt the store.
# The last line is one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
module=chaos
if [ "${1:-}" = kv ]; then
    module=chaos.kv
    shift
elif [ "$#" -eq 0 ]; then
    set -- run failover
fi
exec .venv/bin/python -m "$module" "$@"
