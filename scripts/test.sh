#!/usr/bin/env bash
# Lint and tests. The tests run in two processes side by side, for most of them wait for others more than they compute;
# beside them, with a lower priority, lint, and the tests of Triton's kernels, which need a process of their own. What ran
# beside is printed at the end. Arguments go to pytest, after lint; with arguments that is all.
# Each process is bounded: TEST_LIMIT_S, 1320 s unless set.
set -euo pipefail
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" # threads that spin while they wait take a core from the tests beside
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
model() {
    HEADRACE_TEST_MODEL="${HEADRACE_TEST_MODEL:-$(.venv/bin/python -m headrace.fetch)}"
    export HEADRACE_TEST_MODEL
}
# It takes the place of the shell that calls it: what is not put in parentheses ends with it.
bounded() { exec timeout --kill-after=10 "${TEST_LIMIT_S:-1320}" "$@" </dev/null; }
tests() { bounded .venv/bin/python -m pytest -m "not soak" --durations=40 --durations-min=4 "$@"; }
if [ $# -gt 0 ]; then
    scripts/lint.sh
    model
    tests "$@"
fi
.venv/bin/ruff check . # the rest of lint takes a while
model
told="$(mktemp -d)"
(bounded nice -n 19 scripts/lint.sh) >"$told/lint" 2>&1 &
lint=$!
if .venv/bin/python -c 'import triton' 2>/dev/null; then
    (TRITON_INTERPRET=1 OMP_NUM_THREADS=1 bounded nice -n 10 .venv/bin/python -m pytest --timeout=900 tests/triton) >"$told/triton" 2>&1 &
else
    echo "no Triton for this platform: its kernels are not tested" >"$told/triton" &
fi
triton=$!
whole_parts=(tests/system tests/bench tests/models)
(tests "${whole_parts[@]}") >"$told/whole" 2>&1 &
whole=$!
trap 'kill "$lint" "$triton" "$whole" 2>/dev/null || true; rm -rf "$told"' EXIT
echo "==> pytest, all but ${whole_parts[*]}"
failed=0
(tests "${whole_parts[@]/#/--ignore=}") || failed=$?
for one in whole lint triton; do
    wait "${!one}" || failed=$?
    echo "==> $one"
    cat "$told/$one"
done
exit "$failed"
