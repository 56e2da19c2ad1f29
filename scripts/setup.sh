#!/usr/bin/env bash
# Make .venv with everything installed. Running it again takes a second; after an interruption it goes on.
#   PYTHON=python3.12      the Python to build it with (default: the first of 3.11, 3.12, 3.13, ... that
#                          works; on Linux x86-64 3.12 first, which needs no compiler)
#   MIXTAPE_VENV=DIR       another place than .venv; a relative one is relative to the repository
#   MIXTAPE_CUDA=1         accept a torch with CUDA (gigabytes) on a machine without an NVIDIA GPU
set -euo pipefail
case ${1-} in
    "") ;;
    -h | --help) sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"; exit ;;
    *) echo "setup.sh: unknown option $1; see setup.sh --help" >&2; exit 1 ;;
esac
unset CDPATH # with it cd may go elsewhere, and print where
case ${PYTHON-} in /*) ;; */*) PYTHON=$PWD/$PYTHON ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${MIXTAPE_VENV:-.venv}"
log="$venv/setup.log"
stamp="$venv/setup.done"

die() {
    echo "setup.sh: $*" >&2
    exit 1
}

# Say what is done and for how long; keep the output in the log, and show its end on failure.
step() {
    local title="$1" started=$SECONDS next=15
    shift
    number=$((number + 1))
    echo "[$number/$steps] $title"
    printf '\n== %s: %s\n' "$title" "$*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.5
        if ((SECONDS - started >= next)); then
            echo "      $((SECONDS - started)) s: $(tail -n 1 "$log" | cut -c 1-100)"
            next=$((next + 15))
        fi
    done
    if ! wait "$child"; then
        tail -n 25 "$log" >&2
        die "failed: $title; the whole output is in $log"
    fi
    child=
    echo "      done in $((SECONDS - started)) s"
}
child=
number=0
trap '[ -z "$child" ] || kill "$child" 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM

works() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1; }

if [ -n "${PYTHON:-}" ]; then
    "$PYTHON" -c '' >/dev/null 2>&1 || die "PYTHON=$PYTHON does not run: name a Python of 3.8 or later"
    works "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1): 3.8 or later is needed, best 3.11 or 3.12"
elif [ -x "$venv/bin/python" ] && works "$venv/bin/python"; then
    PYTHON="$venv/bin/python"
else
    candidates=(python3.11 python3.12 python3.13 python3 python python3.10 python3.9 python3.8)
    [ "$(uname -sm)" != "Linux x86_64" ] || candidates=(python3.12 "${candidates[@]}") # has a compiled fairseq there
    for candidate in "${candidates[@]}"; do
        if works "$candidate"; then
            PYTHON="$candidate"
            break
        fi
    done
    [ -n "${PYTHON:-}" ] || die "no Python of 3.8 or later found: install 3.11 or 3.12, or set PYTHON to its path"
fi
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# What an environment is made from: it is made again where one of these changes.
recipe=$(cat setup.py scripts/setup.sh && pwd -P && echo "$version")
fingerprint=$("$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.argv[1].encode()).hexdigest())' "$recipe")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$fingerprint" ] && works "$venv/bin/python"; then
    echo "environment: $venv (Python $version), ready"
    exit 0
fi

# Fail in a second rather than after minutes: what pip would stumble over.
"$PYTHON" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    die "Python $version ($PYTHON) has no venv module: install it (Debian and Ubuntu: apt install python$version-venv)"
if [ "$version $(uname -sm)" != "3.12 Linux x86_64" ]; then  # the one platform with a compiled fairseq
    cc="${CC:-cc}" cxx="${CXX:-c++}"
    for compiler in "$cc" "$cxx"; do
        command -v "${compiler%% *}" >/dev/null ||
            die "no C/C++ compiler ($compiler), and fairseq is compiled on Python $version: install one" \
                "(Debian and Ubuntu: apt install g++), or use Python 3.12 on Linux x86-64, which needs none"
    done
    include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    [ -f "$include/Python.h" ] ||
        die "the headers of Python $version are missing ($include/Python.h), and fairseq is compiled on it:" \
            "install them (Debian and Ubuntu: apt install python$version-dev)"
fi
if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
    [ -z "$(ls -A "$venv" | grep -v '^setup.log$')" ] || die "$venv is not empty and no virtual environment: move it, or set MIXTAPE_VENV"
elif works "$venv/bin/python"; then
    found=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [ "$found" = "$version" ] ||
        die "$venv has Python $found and PYTHON=$PYTHON is $version: remove $venv, or set MIXTAPE_VENV"
fi

if [ "${version#3.}" -ge 11 ]; then
    torch="torch==2.13.0" numpy="numpy" fairseq="fairseq-fixed==0.12.3.1" pip_version="pip>=23"
else  # stock fairseq, best effort; newer pip refuses the omegaconf that it needs
    torch="torch==1.12.1" numpy="numpy<1.24" fairseq="fairseq==0.12.2" pip_version="pip>=23,<24.1"
fi

steps=6
mkdir -p "$venv"
: >"$log"
echo "environment: $venv (Python $version); about 4 minutes, output in $log"
if works "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    step "keep the environment that is there" true
else
    step "make the environment" "$PYTHON" -m venv "$venv"
fi
python="$venv/bin/python"
# fairseq's build asks for torch: in isolation pip would fetch another one for it, with gigabytes of CUDA.
# setuptools 81 lost pkg_resources, which older hydra imports.
printf '%s\n' "$torch" "setuptools<81" >"$venv/constraints.txt"
pip=("$python" -m pip install --disable-pip-version-check --no-input --progress-bar off)
pip+=(--no-build-isolation -c "$venv/constraints.txt")
step "build tools" "${pip[@]}" "$pip_version" setuptools wheel cython "$numpy"

# pip takes the build of torch that its index offers; outside of PyTorch's own CPU index that is the one with CUDA.
report="$venv/torch-report.json"
step "look at what $torch brings along" "${pip[@]}" --dry-run --no-deps --report "$report" "$torch"
cuda_packages=$("$python" - "$report" <<'PYTHON'
import json
import sys

from pip._vendor.packaging.requirements import Requirement

needed = [text for item in json.load(open(sys.argv[1]))["install"] for text in item["metadata"].get("requires_dist", [])]
needed = [Requirement(text) for text in needed]
needed = [package.name for package in needed if not package.marker or package.marker.evaluate({"extra": ""})]
print(sum(name.lower().startswith(("nvidia-", "cuda-")) for name in needed))
PYTHON
)
if [ "$cuda_packages" != 0 ] && [ "${MIXTAPE_CUDA:-0}" != 1 ] && ! nvidia-smi >/dev/null 2>&1; then
    die "pip would fetch $torch with $cuda_packages CUDA packages (gigabytes), and there is no NVIDIA GPU here:" \
        "point pip at PyTorch's own index of CPU builds (PIP_INDEX_URL or PIP_EXTRA_INDEX_URL; the address is at" \
        "pytorch.org/get-started), or set MIXTAPE_CUDA=1 to accept them"
fi

step "$torch" "${pip[@]}" "$torch"
step "$fairseq (compiled here on most Pythons: 2 minutes)" "${pip[@]}" "$fairseq"
step "the plugin and its tools" "${pip[@]}" -e ".[dev]"

echo "$fingerprint" >"$stamp.tmp"
mv "$stamp.tmp" "$stamp"
echo "environment: $venv, ready after $SECONDS s"
