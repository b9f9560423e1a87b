#!/usr/bin/env bash
# The suite, without the zoo and the tests that compile through Inductor, on every PyTorch from the lowest supported on:
#
#     tools/matrix.sh [version ...]        MATRIX=folder for the environments and logs; PYTEST_FLAGS as for make
#
# Prints the table of docs/versioning.md. An environment that is there already is used as it is.

set -euo pipefail
cd "$(dirname "$0")/.."
folder=${MATRIX:-${TMPDIR:-/tmp}/fxgrad-matrix}
versions=("$@")
if [ ${#versions[@]} = 0 ]; then versions=(2.11.0 2.12.1 2.13.0 2.14.1 2.15.0); fi

environment() { # version, folder: torch first, as `make test` does; each torch has its own bound on setuptools
    "${PYTHON:-python3}" -m venv "$2" &&
        "$2/bin/python" -m pip install --quiet "torch==$1" &&
        grep -Ev '^(torch|setuptools)==' constraints.txt >"$2/constraints.txt" &&
        "$2/bin/python" -m pip install --quiet -c "$2/constraints.txt" -e ".[dev]" &&
        touch "$2/installed"
}

summary() { # log: "2713 passed, 2 xfailed"
    sed -En 's/, [0-9]+ deselected//; s/^=+ (.*) in [0-9.]+s.* =+$/\1/p' "$1" | tail -1
}

mkdir -p "$folder"
status=0
rows=()
for version in "${versions[@]}"; do
    env=$folder/$version
    log=$folder/$version.log
    echo "torch $version: see $log" >&2
    if ! [ -e "$env/installed" ] && ! environment "$version" "$env" >"$log" 2>&1; then
        rows+=("| $version | cannot be installed |")
        status=1
        continue
    fi
    # Inductor's cache is one per version: what one PyTorch compiled is not for another.
    OMP_NUM_THREADS=1 PYTHONPATH=$PWD TORCHINDUCTOR_CACHE_DIR=$folder/cache-$version \
        "$env/bin/python" -m pytest -p no:cacheprovider --ignore=tests/zoo ${PYTEST_FLAGS--n 2} -m "not long and not inductor" \
        >"$log" 2>&1 || status=1
    rows+=("| $version | $(summary "$log") |")
done

echo "| torch | the suite without Inductor |"
echo "|---|---|"
printf '%s\n' "${rows[@]}"
exit $status
