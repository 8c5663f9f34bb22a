#!/usr/bin/env bash
# Install if needed, fetch the default model if needed, then start everything.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh
exec .venv/bin/headrace up "$@"
