#!/usr/bin/env bash
# Every check that needs no test run: style, types, shell. Fixing: ruff check --fix, ruff format.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
'') ;;
-h | --help)
    cat <<'TEXT'
usage: scripts/lint.sh

Every check that needs no test run, on the whole checkout: ruff, mypy, shellcheck, clang-format. They are installed into
.venv when they are not there. To mend what can be mended: .venv/bin/ruff check --fix, .venv/bin/ruff format.
TEXT
    exit 0
    ;;
*) die "unknown argument $1: it always checks the whole checkout" "scripts/lint.sh --help says more" ;;
esac

cd "$ROOT"
env_prepare "$ROOT/.venv"
env_dev "$ROOT/.venv"

failed=()
check() {
    say "$*"
    "$ROOT/.venv/bin/$1" "${@:2}" </dev/null || failed+=("$*")
}

shells=()
while IFS= read -r file; do shells+=("$file"); done < <(find scripts .ci -type f \( -name '*.sh' -o -path '.ci/run' \) | sort)
sources=()
while IFS= read -r file; do sources+=("$file"); done < <(
    find ./*_kernels runtime device tests -type f \( -name '*.cpp' -o -name '*.cc' -o -name '*.h' -o -name '*.hpp' \) 2>/dev/null | sort
)

check ruff check .
check ruff format --check .
check mypy
check shellcheck -x "${shells[@]}"
if [ ${#sources[@]} -gt 0 ]; then check clang-format --dry-run -Werror "${sources[@]}"; fi

if [ ${#failed[@]} -gt 0 ]; then die "not clean:" "${failed[@]}"; fi
say "style, types and shell scripts are clean"
