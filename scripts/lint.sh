#!/usr/bin/env bash
# Style, types and the arrows between packages.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh dev
echo "==> ruff"
.venv/bin/ruff check .
echo "==> mypy"
.venv/bin/mypy
echo "==> import-linter"
.venv/bin/lint-imports
