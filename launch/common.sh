# Sourced by the launch scripts: hands over to the launcher, `python -m tessera.launch`.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export TESSERA_PYTHON=${TESSERA_PYTHON:-${PYTHON:-python3}}
export TESSERA_VENV=${TESSERA_VENV:-${VENV:-$ROOT/.venv}}
# The launcher makes the environment, for which any interpreter does. It takes this folder out again for its
# children.
export PYTHONPATH=$ROOT/components/src${PYTHONPATH:+:$PYTHONPATH}

# launch agg|e_p [FLAG...]
launch() {
    local python=$TESSERA_VENV/bin/python
    if [[ ! -x $python ]]; then
        python=$TESSERA_PYTHON
        # It says what is wrong with this interpreter.
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || exec "$ROOT/scripts/setup"
    fi
    # A signal waits until the launcher can hear it: in its first 20 ms Ctrl-C would end it with a traceback.
    local hold=(env --block-signal="INT,TERM,HUP")
    # Coreutils before 8.31 cannot.
    "${hold[@]}" true 2>/dev/null || hold=()
    # Without its site-packages, which it needs once the processes are under way: their .pth files may take long.
    exec "${hold[@]}" "$python" -S -m tessera.launch --root "$ROOT" "$@"
}
