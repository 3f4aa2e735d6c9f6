#!/usr/bin/env bash
# Sets up and runs the tests.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<TEXT
usage: scripts/test.sh [--all | --reference] [--long] [pytest arguments]

Without options: the plain suite, in .venv. No tensor framework is installed; about $((CORE_MB + DEV_MB + MODEL_MB)) MB are
downloaded the first time, the model included.

  --reference  compares with torch and transformers anew (tests/reference), in .venvs/reference:
               $REFERENCE_SIZE
  --all        what CI runs: the plain suite, the set-up tests (whole environments from the package index)
               and --reference
  --long       more examples in each property test

What follows is given to pytest, paths relative to the checkout: scripts/test.sh tests/runtime -k prefix
An option of pytest that begins with two dashes comes after a path or after --: scripts/test.sh -- --lf
JUMAR_PYTHON=/path/to/python chooses the Python. pip's settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX,
pip.conf, ...) say where packages come from.
TEXT
}

plain=1 setup=0 reference=0
while [ $# -gt 0 ]; do
    case $1 in
    --reference) plain=0 reference=1 ;;
    --all) plain=1 setup=1 reference=1 ;;
    --long) export JUMAR_TEST_LONG=1 ;;
    -h | --help)
        usage
        exit 0
        ;;
    --)
        shift
        break
        ;;
    --*) die "unknown option $1" "scripts/test.sh --help lists them; one of pytest's comes after --" ;;
    *) break ;;
    esac
    shift
done

cd "$ROOT"
# The tests talk to servers on this machine only.
export NO_PROXY="127.0.0.1,localhost" no_proxy="127.0.0.1,localhost"

# pytest in the foreground: it handles Ctrl-C itself.
tests() {
    local python=$1
    shift
    say "python -m pytest $*"
    "$python" -m pytest "$@" </dev/null
}

if [ "$plain" = 1 ]; then
    env_prepare "$ROOT/.venv"
    env_dev "$ROOT/.venv"
    env_kernels "$ROOT/.venv"
    env_model "$ROOT/.venv"
    tests "$ROOT/.venv/bin/python" "$@"
    if [ "$setup" = 1 ]; then tests "$ROOT/.venv/bin/python" tests/scripts -m setup "$@"; fi
fi

if [ "$reference" = 1 ]; then
    dir=$ROOT/.venvs/reference
    env_prepare "$dir"
    env_reference "$dir"
    env_model "$dir"
    JUMAR_TEST_REFERENCE=1 tests "$dir/bin/python" tests/reference "$@"
fi
