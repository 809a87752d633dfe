#!/usr/bin/env bash
# Makes .venv with everything that runs on a CPU, or with the argument `gpu` .venv-gpu with everything for NVIDIA GPUs; does
# nothing where it is there and up to date. PYTHON=/path/to/python chooses the interpreter (3.10 to 3.12).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

KIND=${1:-cpu}
case $KIND in
    cpu) VENV=.venv MADE_FROM="constraints/cpu.txt constraints/cpu-no-deps.txt" ;;
    gpu) VENV=.venv-gpu MADE_FROM=constraints/gpu.txt ;;
    *) echo "verl_ext: $0 $KIND: accepted are cpu, gpu" >&2 && exit 2 ;;
esac
STAMP=$VENV/.verl_ext-ready   # written last; holds what the environment was made from
BROKEN=$VENV/.verl_ext-unfinished
LOG=$VENV/setup.log

# What the environment depends on. The folder counts too: an environment does not survive a move.
wanted() { { pwd -P; cat pyproject.toml $MADE_FROM scripts/setup_env.sh; } | cksum; }

supported() { # command -> its version, if it is a Python that can be used
    "$1" -c 'import sys, venv, ensurepip
if not (3, 10) <= sys.version_info[:2] <= (3, 12): raise SystemExit(1)
print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3 python}; do
        if supported "$candidate" >/dev/null; then
            echo "$candidate"
            return
        fi
    done
    {
        echo "verl_ext: no Python 3.10, 3.11 or 3.12 with venv and ensurepip found (tried: ${PYTHON:-python3.11 python3.12 python3.10 python3 python})."
        echo "  Install one (on Debian or Ubuntu: python3.11 and python3.11-venv), or name one: make setup PYTHON=/path/to/python3.11"
    } >&2
    return 1
}

stage() { # number, what, command...
    local number=$1 what=$2 start=$SECONDS
    shift 2
    printf '[%s/4] %s ... ' "$number" "$what"
    if ! "$@" >>"$LOG" 2>&1 </dev/null; then
        printf 'failed. Last lines of %s:\n' "$LOG"
        tail -n 20 "$LOG"
        echo "Is the package index reachable, and is the disk not full? Then run the same command again."
        # uv and pip change nothing before they have everything: a failed stage can be tried again where it stands.
        rm -f "$BROKEN"
        exit 1
    fi
    printf '%d s\n' $((SECONDS - start))
}

if [ "$(cat "$STAMP" 2>/dev/null)" = "$(wanted)" ]; then
    exit 0
fi

started=$SECONDS
if [ -e "$BROKEN" ]; then
    echo "Setting up was interrupted before; starting over."
    rm -rf "$VENV"
elif [ -d "$VENV" ] && ! { supported "$VENV/bin/python" >/dev/null &&
    head -n 2 "$VENV/bin/pip" | grep -qF "$(pwd -P)/$VENV/bin/"; }; then
    echo "The environment in $VENV is of another place or Python; making it anew."
    rm -rf "$VENV"
fi
if [ ! -d "$VENV" ]; then
    python=$(find_python)
    if [ "$KIND" = cpu ]; then
        what="verl, Ray, vLLM's CPU build (3 GB of disk, more with torch's CUDA build)"
    else
        what="verl, Ray, vLLM, PyTorch for CUDA 13 (10 GB of disk)"
    fi
    echo "Making $VENV with Python $(supported "$python"): $what."
    mkdir "$VENV"
    touch "$BROKEN"
    stage 1 "virtual environment" "$python" -m venv "$VENV"
else
    echo "Completing $VENV, or bringing it up to date."
fi
rm -f "$STAMP"
touch "$BROKEN"
# Everything is compiled here: left to the first run, its nine processes would each compile the same modules.
pip=("$VENV/bin/python" -m pip install --no-input --disable-pip-version-check)
constraints=(-c "constraints/$KIND.txt")

pip_setting() { # name -> the value that pip's files or PIP_ variables give it; uv reads neither
    "$VENV/bin/python" -m pip config list 2>/dev/null | sed -n "s/^[^=]*[.]$1='\(.*\)'$/\1/p" | head -n 1
}

find_uv() { # uv, which takes a fraction of pip's time, with pip's settings
    "${pip[@]}" "${constraints[@]}" -q uv && [ -x "$VENV/bin/uv" ] || return 1
    export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$(pip_setting index-url)} UV_INDEX=${UV_INDEX:-$(pip_setting extra-index-url)}
    export UV_FIND_LINKS=${UV_FIND_LINKS:-$(pip_setting find-links)} SSL_CERT_FILE=${SSL_CERT_FILE:-$(pip_setting cert)}
    local name
    for name in UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS SSL_CERT_FILE; do
        [ -n "${!name}" ] || unset "$name"
    done
    # As pip: the best version of all indexes, wherever it lies.
    export UV_INDEX_STRATEGY=unsafe-best-match UV_COMPILE_BYTECODE=1
    uv=("$VENV/bin/uv" pip install --python "$VENV/bin/python")
}

install() { # arguments of pip install; where uv cannot be had or fails, pip does the work
    "${uv[@]:-false}" "$@" || "${pip[@]}" "$@"
}

uv=()
find_uv >>"$LOG" 2>&1 </dev/null || true
if [ "$KIND" = cpu ]; then
    # torch first and alone: whichever build of this version the package index has serves.
    stage 2 "PyTorch" install "${constraints[@]}" torch
    stage 3 "verl, Ray and the rest" install "${constraints[@]}" -e ".[cpu,dev]"
    stage 4 "vLLM's CPU build" install --no-deps -r constraints/cpu-no-deps.txt
else
    # Older ones download whole packages to read what they need.
    stage 2 "pip" "${pip[@]}" "pip>=25"
    stage 3 "verl, vLLM, Ray and the rest" install "${constraints[@]}" -e ".[gpu,dev]"
    stage 4 "what fits together" "$VENV/bin/python" -m pip check
fi
"$VENV/bin/python" -c "from verl_ext.checks.versions import check_versions; check_versions('${KIND/gpu/cuda}')"
wanted >"$STAMP"
rm -f "$BROKEN"
echo "The environment is ready after $((SECONDS - started)) s."
