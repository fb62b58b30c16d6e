#!/bin/sh
# Make build/venvs/NAME hold exactly the hashed requirements in FILE, with the system's Python, by uv.
#
#   scripts/venv.sh NAME FILE        does nothing, in a moment, when the environment is up to date
#
# SLURM_DDP_PYTHON names another interpreter (3.11 or newer).
set -eu
[ $# = 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
name=$1 file=$2
venv=$root/build/venvs/$name
python=${SLURM_DDP_PYTHON:-/usr/bin/python3}
log=$root/build/logs/venv-$name.log

mkdir -p "$root/build/venvs" "$root/build/logs"
stamp="$("$python" -c 'import sys; print(sys.version)') $(sha256sum <"$root/$file")"
fresh() { [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ] && [ -x "$venv/bin/python" ]; }
fresh && exit 0

# uv itself comes by pip, which every Python has
[ "$name" = uv ] || SLURM_DDP_PYTHON='' "$0" uv tests/requirements/uv.txt

exec 9>"$root/build/venvs/.$name.lock"
flock 9
fresh && exit 0

echo "$name: making its Python environment"
rm -rf "$venv"
start=$(date +%s)
(
    set -e
    if [ "$name" = uv ]; then
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip --disable-pip-version-check install --progress-bar off --no-compile --require-hashes -r "$root/$file"
    else
        "$python" "$root/scripts/uv.py" venv --quiet --python "$python" "$venv"
        "$python" "$root/scripts/uv.py" pip install --compile-bytecode --python "$venv/bin/python" --require-hashes -r "$root/$file"
    fi
) >"$log" 2>&1 9>&- &
pid=$!
trap 'kill $pid 2>/dev/null; exit 130' INT TERM
ticks=0
while kill -0 $pid 2>/dev/null; do
    sleep 0.2
    ticks=$((ticks + 1))
    [ $((ticks % 25)) != 0 ] || echo "$name: [$(($(date +%s) - start)) s] $(grep -v '^WARNING' "$log" | tail -n 1 | cut -c 1-100)"
done
if ! wait $pid; then
    tail -n 15 "$log" >&2
    echo "$name: the environment could not be made; the whole log is build/logs/venv-$name.log" >&2
    exit 1
fi
echo "$stamp" >"$venv/.stamp"
echo "$name: ready in $(($(date +%s) - start)) s"
