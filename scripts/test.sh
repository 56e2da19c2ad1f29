#!/usr/bin/env bash
# Set up, lint, and run the whole test suite; arguments go to pytest:  scripts/test.sh -k mixtape -x
set -euo pipefail
case ${1-} in -h | --help) sed -n '2s/^# //p' "${BASH_SOURCE[0]}"; exit ;; esac
unset CDPATH # with it cd may go elsewhere, and print where
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
bin="${MIXTAPE_VENV:-.venv}/bin"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # tiny tensors: more threads only cost time

"$bin/ruff" check .
"$bin/ruff" format --check .
# Files side by side, one a core; within a file tests share what they train.
"$bin/python" -m pytest -q --durations=10 -n auto --dist loadfile "$@"
