#!/usr/bin/env bash
# Lint, then the tests, then those of Triton's kernels, which need a process of their own. Arguments go to the first
# pytest; with arguments that is all. Both runs are bounded: TEST_LIMIT_S, 1300 s unless set, and TRITON_LIMIT_S, 180 s.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
scripts/lint.sh
echo "==> model"
HEADRACE_TEST_MODEL="${HEADRACE_TEST_MODEL:-$(.venv/bin/python -m headrace.fetch)}"
export HEADRACE_TEST_MODEL
echo "==> pytest"
timeout --kill-after=10 "${TEST_LIMIT_S:-1300}" .venv/bin/python -m pytest -m "not soak" --durations=40 --durations-min=4 "$@" </dev/null
if [ $# -gt 0 ]; then
    exit
elif ! .venv/bin/python -c 'import triton' 2>/dev/null; then
    echo "==> no Triton for this platform: its kernels are not tested"
else
    echo "==> pytest, Triton kernels interpreted"
    TRITON_INTERPRET=1 timeout --kill-after=10 "${TRITON_LIMIT_S:-180}" .venv/bin/python -m pytest tests/triton </dev/null
fi
