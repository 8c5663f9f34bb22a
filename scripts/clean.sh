#!/usr/bin/env bash
# Remove what the other targets made here. The model cache outside the checkout stays.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
find . -name __pycache__ -type d -prune -exec rm -rf {} +
