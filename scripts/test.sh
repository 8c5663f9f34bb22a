#!/usr/bin/env bash
# Lint, then the tests, beside them those of Triton's kernels, which need a process of their own. Arguments go to the first
# pytest; with arguments that is all. Both runs are bounded: TEST_LIMIT_S, 1350 s unless set, and TRITON_LIMIT_S, 600 s.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
scripts/lint.sh
echo "==> model"
HEADRACE_TEST_MODEL="${HEADRACE_TEST_MODEL:-$(.venv/bin/python -m headrace.fetch)}"
export HEADRACE_TEST_MODEL
echo "==> pytest"
tests() {
    timeout --kill-after=10 "${TEST_LIMIT_S:-1350}" .venv/bin/python -m pytest -m "not soak" --durations=40 --durations-min=4 "$@" </dev/null
}
if [ $# -gt 0 ]; then
    tests "$@"
    exit
fi
if ! .venv/bin/python -c 'import triton' 2>/dev/null; then
    echo "==> no Triton for this platform: its kernels are not tested"
    tests
    exit
fi
# The interpreter only computes, on one core: with the lowest priority it takes what the other tests leave while they wait.
told="$(mktemp)"
TRITON_INTERPRET=1 OMP_NUM_THREADS=1 timeout --kill-after=10 "${TRITON_LIMIT_S:-600}" \
    nice -n 19 .venv/bin/python -m pytest tests/triton </dev/null >"$told" 2>&1 &
triton=$!
trap 'kill "$triton" 2>/dev/null || true; rm -f "$told"' EXIT
failed=0
tests || failed=$?
wait "$triton" || failed=$?
echo "==> pytest, Triton kernels interpreted"
cat "$told"
exit "$failed"
