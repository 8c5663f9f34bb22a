#!/usr/bin/env bash
# Lint, then the tests. Arguments go to pytest. The whole run is bounded: TEST_LIMIT_S, 1200 s unless set.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
scripts/lint.sh
echo "==> model"
HEADRACE_TEST_MODEL="${HEADRACE_TEST_MODEL:-$(.venv/bin/python -m headrace.fetch)}"
export HEADRACE_TEST_MODEL
echo "==> pytest"
exec timeout --kill-after=10 "${TEST_LIMIT_S:-1200}" .venv/bin/python -m pytest -m "not soak" "$@" </dev/null
