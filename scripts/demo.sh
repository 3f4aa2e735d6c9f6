#!/usr/bin/env bash
# From a fresh clone to an answer: makes .venv, installs, gets a small model, serves it, asks one question.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'TEXT'
usage: scripts/demo.sh [--once] [--port N]

Makes .venv in the checkout, installs Jumar and the model smollm2-135m into it, starts the service on 127.0.0.1,
sends one chat request, prints the answer with its speed, and goes on serving until Ctrl-C.
A second run downloads nothing.

  --once    end after the answer
  --port N  the first port to try (default 8000); a taken one is passed over

JUMAR_PYTHON=/path/to/python chooses the Python. pip's settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX,
pip.conf, ...) say where packages come from.
TEXT
}

args=()
while [ $# -gt 0 ]; do
    case $1 in
    --once) args+=(--once) ;;
    --port)
        # Before anything is set up: a typing error should not wait for downloads.
        case ${2:-} in
        '' | *[!0-9]* | ??????*) die "--port ${2:-(nothing)}: expected a number from 1 to 65535" ;;
        esac
        [ "$2" -ge 1 ] && [ "$2" -le 65535 ] || die "--port $2: expected a number from 1 to 65535"
        args+=(--port "$2")
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) die "unknown option $1" "scripts/demo.sh --help lists them" ;;
    esac
    shift
done

cd "$ROOT"
env_prepare "$ROOT/.venv"
env_core "$ROOT/.venv"
env_kernels "$ROOT/.venv"
env_model "$ROOT/.venv"
# exec: whoever ends this process ends the demo itself, and with it the server.
exec "$ROOT/.venv/bin/python" -E "$ROOT/scripts/demo.py" "$ROOT/.venv/bin/jumar" ${args[@]+"${args[@]}"}
