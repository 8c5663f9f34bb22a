#!/usr/bin/env bash
# Measure; the last line is one JSON object. Usage: scripts/bench.sh [NAME] [options], where NAME is one of
# engine, peers, speculation, memory, replay, kv, overload, fairness, cancel, failover, migration, soak.
# Without a name: the whole system over HTTP. `peers` installs the other servers on its first run.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
module=bench
case "${1:-}" in
engine | peers | speculation | memory | replay | kv | overload | fairness | cancel | failover | migration | soak)
    module="bench.$1"
    shift
    ;;
esac
if [ "$module" = bench.peers ]; then scripts/peers.sh; fi
exec .venv/bin/python -m "$module" "$@"
