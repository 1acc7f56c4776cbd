# Sourced by the launch scripts: environment with defaults, set-up, children, readiness.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

export PYTHON=${PYTHON:-python3}
export VENV=${VENV:-$ROOT/.venv}
export MODEL_PATH=${MODEL_PATH:-$ROOT/components/src/tessera/checkpoints/tessera-demo}
export SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-$(basename "$MODEL_PATH")}
export DYN_HTTP_HOST=${DYN_HTTP_HOST:-127.0.0.1}
export DYN_HTTP_PORT=${DYN_HTTP_PORT:-8000}
# Frontends listen on this port and the ones above it; 0 for a host that has workers alone.
export FRONTENDS=${FRONTENDS:-1}
# Workers answer /health and /metrics on this port and the ones above it.
export DYN_SYSTEM_PORT_BASE=${DYN_SYSTEM_PORT_BASE:-8081}
export DYN_NAMESPACE=${DYN_NAMESPACE:-tessera}
export DYN_DISCOVERY_BACKEND=${DYN_DISCOVERY_BACKEND:-file}
export DYN_REQUEST_PLANE=${DYN_REQUEST_PLANE:-tcp}
export MODALITY=${MODALITY:-multimodal}
export ALLOWED_LOCAL_MEDIA_PATH=${ALLOWED_LOCAL_MEDIA_PATH:-}
# The page to try the service on, at /: on or off.
export FRONTEND_PAGE=${FRONTEND_PAGE:-on}
export MAX_FILE_SIZE_MB=${MAX_FILE_SIZE_MB:-50}
# text or json, and debug, info, warning or error.
export LOG_FORMAT=${LOG_FORMAT:-text}
export LOG_LEVEL=${LOG_LEVEL:-info}
export READY_TIMEOUT_SECONDS=${READY_TIMEOUT_SECONDS:-600}
# Of the frontends, then of the workers, what has not drained by then is killed; above their own --drain-seconds.
export STOP_TIMEOUT_SECONDS=${STOP_TIMEOUT_SECONDS:-60}
ENGINE_CONFIGS=$ROOT/engine_configs/llama_nemotron_vl

PIDS=()
NAMES=()
COMMANDS=()
STARTED=()
DELAYS=()
# Whether what runs in a child's place is the pause before it is started again.
PAUSING=()
READY_PID=
OWN_STORE=
MPS_FOLDER=

say() { log_line INFO "$@"; }
warn() { log_line WARN "$@"; }
complain() { log_line ERROR "$@"; }
fail() {
    complain "$@"
    exit 1
}

# log_line LEVEL WORD...
log_line() {
    local level=$1 message
    shift
    if [[ $LOG_FORMAT != json ]]; then
        printf '%s\n' "tessera: $*" >&2
        return
    fi
    message=${*//\\/\\\\}
    message=${message//\"/\\\"}
    printf '{"time":"%s","level":"%s","target":"launch","role":"launch","pid":%d,"message":"tessera: %s"}\n' \
        "$(date -u +%FT%T.%6NZ)" "$level" $$ "${message//[[:cntrl:]]/ }" >&2
}

# What the script is, and the README's table of variables, without what only the other script reads.
usage() {
    local script others=nothing
    script=$(basename "$0")
    if [[ $script != e_p.sh ]]; then others='e_p\.sh'; fi
    printf 'usage: ./launch/%s [FLAG...]\n\n' "$script"
    sed -n '2,/^[^#]/s/^# //p' "$0"
    printf 'All flags: .venv/bin/python -m tessera.worker --help\n\nVariables and their defaults:\n'
    sed -n "/^| variable |/,/^\$/{/$others/d; /^| \`/{s/\`//g; s/\[\([^]]*\)\]([^)]*)/\1/g; s/ *| */|/g
        s/^|\([^|]*\)|\([^|]*\)|\([^|]*\)|\$/  \1 (\2)\n      \3/; s/ ()//; p}}" "$ROOT/README.md"
}
for argument; do
    if [[ $argument == -h || $argument == --help ]]; then
        usage
        exit 0
    fi
done

# Bash's arithmetic would take a word for the name of a variable.
for name in FRONTENDS ENCODE_WORKERS EMBED_WORKERS DYN_HTTP_PORT DYN_SYSTEM_PORT_BASE STOP_TIMEOUT_SECONDS; do
    if [[ ! ${!name:-0} =~ ^(0|[1-9][0-9]*)$ ]]; then
        fail "$name=${!name}: is not a whole number"
    fi
done

# Ends every child by its pid and waits for it; a second Ctrl-C does not leave any behind.
cleanup() {
    local status=$?
    trap '' INT TERM HUP
    trap - EXIT
    local role index group pid
    # A frozen child cannot obey, nor finish what others wait for.
    for pid in $(jobs -rp); do
        kill -CONT "$pid" 2>/dev/null || true
    done
    # It would report the end of the others.
    end_children "$READY_PID"
    # Frontends take nothing new and finish what they have, for which they need the workers, and embed workers
    # the encode workers. None is started again meanwhile.
    for role in frontend agg embed encode; do
        group=()
        for index in "${!PIDS[@]}"; do
            if [[ ${NAMES[index]} == "$role"* ]]; then group+=("${PIDS[index]}"); fi
        done
        end_children "${group[@]}"
    done
    # shellcheck disable=SC2046
    end_children $(jobs -rp)
    if [[ -n $OWN_STORE ]]; then rm -rf "$OWN_STORE"; fi
    if [[ -n $MPS_FOLDER ]]; then rm -rf "$MPS_FOLDER"; fi
    exit "$status"
}

# end_children PID...: asks these children to end, all at once, and waits until they have.
end_children() {
    local pid left asked=' ' deadline=$((SECONDS + STOP_TIMEOUT_SECONDS)) killed=
    while true; do
        left=()
        for pid in $(jobs -rp); do
            # A signal that interrupts bash's wait while it collects a child leaves that one among the jobs.
            if [[ " $* " == *" $pid "* ]] && kill -0 "$pid" 2>/dev/null; then left+=("$pid"); fi
        done
        if ((${#left[@]} == 0)); then return 0; fi
        for pid in "${left[@]}"; do
            # A child that has not come to its own program yet would handle the signal as this shell does,
            # and forget it.
            if [[ $asked != *" $pid "* || /proc/$pid/exe -ef /proc/$$/exe ]]; then
                asked+="$pid "
                kill -TERM "$pid" 2>/dev/null || true
            fi
        done
        if [[ -z $killed ]] && ((SECONDS >= deadline)); then
            killed=yes
            warn "killing what has not ended after $STOP_TIMEOUT_SECONDS s"
            kill -KILL "${left[@]}" 2>/dev/null || true
        fi
        sleep 0.05
    done
}

# Creates the virtual environment on first use, and again when what it is made from has changed.
set_up() {
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    local workers=${1:-1} port
    # Somebody else's answers on that port would look like our own.
    for ((port = DYN_HTTP_PORT; port < DYN_HTTP_PORT + FRONTENDS; port++)); do
        if (exec 3<>"/dev/tcp/$DYN_HTTP_HOST/$port") 2>/dev/null; then
            fail "DYN_HTTP_PORT=$DYN_HTTP_PORT: something listens on $DYN_HTTP_HOST:$port already"
        fi
    done
    if ((DYN_SYSTEM_PORT_BASE < 1 || DYN_SYSTEM_PORT_BASE + workers > 32768)); then
        fail "DYN_SYSTEM_PORT_BASE=$DYN_SYSTEM_PORT_BASE: Dynamo takes ports up to 32767"
    fi
    for ((port = DYN_SYSTEM_PORT_BASE; port < DYN_SYSTEM_PORT_BASE + workers; port++)); do
        if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            fail "DYN_SYSTEM_PORT_BASE=$DYN_SYSTEM_PORT_BASE: something listens on port $port already"
        fi
    done
    # Before the environment is made, which may take minutes.
    if [[ ! -d $MODEL_PATH ]]; then
        fail "MODEL_PATH=$MODEL_PATH: no such directory"
    fi
    # A host of frontends alone needs no torch.
    if ((workers > 0)); then "$ROOT/scripts/setup" worker; else "$ROOT/scripts/setup" frontend; fi
    if [[ $DYN_DISCOVERY_BACKEND == file && -z ${DYN_FILE_KV:-} ]]; then
        OWN_STORE=$(mktemp -d "${TMPDIR:-/tmp}/tessera.XXXXXX")
        export DYN_FILE_KV=$OWN_STORE
    fi
}

# What a terminal sends to all of its processes is for the script alone, which ends the others in their order.
deaf_to_the_terminal() {
    trap '' INT HUP
    exec "$@"
}

# start NAME COMMAND...: runs a child in the background; its command is kept for a restart.
start() {
    local name=$1
    shift
    deaf_to_the_terminal "$@" &
    PIDS+=($!)
    NAMES+=("$name")
    STARTED+=("$SECONDS")
    DELAYS+=(1)
    PAUSING+=("")
    # Quoted so that it can be run again later.
    COMMANDS+=("$(printf '%q ' "$@")")
}

shared_flags() {
    printf '%s\n' --model-path "$MODEL_PATH" --served-model-name "$SERVED_MODEL_NAME" --namespace "$DYN_NAMESPACE" \
        --discovery-backend "$DYN_DISCOVERY_BACKEND" --request-plane "$DYN_REQUEST_PLANE" \
        --log-format "$LOG_FORMAT" --log-level "$LOG_LEVEL"
}

# start_frontends EMBED ENCODE: the numbers of workers that will be started, so that a missing one shows.
start_frontends() {
    local frontend
    for ((frontend = 0; frontend < FRONTENDS; frontend++)); do
        start_frontend "$frontend" "$@"
    done
}

start_frontend() {
    local flags=(--host "$DYN_HTTP_HOST" --port "$((DYN_HTTP_PORT + $1))" --max-file-size-mb "$MAX_FILE_SIZE_MB"
        --expect-embed "${EXPECT_EMBED_WORKERS:-$2}" --expect-encode "${EXPECT_ENCODE_WORKERS:-$3}")
    if [[ -n $ALLOWED_LOCAL_MEDIA_PATH ]]; then
        flags+=(--allowed-local-media-path "$ALLOWED_LOCAL_MEDIA_PATH")
    fi
    if [[ $FRONTEND_PAGE == off ]]; then flags+=(--no-page); fi
    # FRONTEND_ARGS holds further flags, separated by spaces.
    # shellcheck disable=SC2206
    flags+=(${FRONTEND_ARGS:-})
    mapfile -t -O "${#flags[@]}" flags < <(shared_flags)
    local name=frontend
    if ((FRONTENDS > 1)); then name="frontend $1"; fi
    start "$name" env -u DYN_SYSTEM_PORT "$VENV/bin/python" -m tessera.frontend "${flags[@]}"
}

# start_worker MODE INDEX GPUS ENGINE_ARGS [FLAGS...]: GPUS is a list like 0,1; worker INDEX takes one of it.
start_worker() {
    local mode=$1 index=$2 gpus=$3 engine_args=$4
    shift 4
    local flags=(--disaggregation-mode "$mode" --modality "$MODALITY" --extra-engine-args "$engine_args")
    mapfile -t -O "${#flags[@]}" flags < <(shared_flags)
    local environment=(DYN_SYSTEM_PORT=$((DYN_SYSTEM_PORT_BASE + ${#PIDS[@]} - FRONTENDS)))
    if [[ -n $gpus ]]; then
        local list
        IFS=, read -ra list <<<"$gpus"
        environment+=("CUDA_VISIBLE_DEVICES=${list[index % ${#list[@]}]}")
    fi
    start "$mode worker $index" env "${environment[@]}" "$VENV/bin/python" -m tessera.worker "${flags[@]}" "$@"
}

# Asks every /health until the service is ready with the given numbers of workers, or a child has ended.
wait_ready() {
    local urls=() port
    for ((port = DYN_HTTP_PORT; port < DYN_HTTP_PORT + FRONTENDS; port++)); do
        urls+=("http://$DYN_HTTP_HOST:$port")
    done
    # A host without a frontend has its workers to ask.
    local workers=()
    if ((FRONTENDS == 0)); then
        for ((port = DYN_SYSTEM_PORT_BASE; port < DYN_SYSTEM_PORT_BASE + ${#PIDS[@]}; port++)); do
            workers+=("http://${DYN_SYSTEM_HOST:-127.0.0.1}:$port")
        done
    fi
    "$VENV/bin/python" -m tessera.frontend.ready --url "${urls[@]}" --worker "${workers[@]}" \
        --embed "$1" --encode "$2" --timeout "$READY_TIMEOUT_SECONDS" --pids "${PIDS[@]}" \
        --log-format "$LOG_FORMAT" --log-level "$LOG_LEVEL" &
    READY_PID=$!
    wait "$READY_PID" || fail "the service did not become ready; see the messages above"
    READY_PID=
    if ((FRONTENDS == 0)); then
        say "ready: ${NAMES[*]}"
        return
    fi
    if [[ $LOG_FORMAT == json ]]; then
        say "ready at ${urls[*]}, model $SERVED_MODEL_NAME"
        return
    fi
    say "ready at ${urls[*]}, model $SERVED_MODEL_NAME. Try:"
    echo >&2
    if [[ $FRONTEND_PAGE != off && " ${FRONTEND_ARGS:-} " != *" --no-page "* ]]; then
        printf '  open http://%s:%s/ in a browser, or\n\n' "$DYN_HTTP_HOST" "$DYN_HTTP_PORT" >&2
    fi
    local key=
    if [[ -n ${TESSERA_API_KEYS:-} || ${FRONTEND_ARGS:-} == *--api-keys-file* ]]; then
        key=" -H 'Authorization: Bearer KEY'"
    fi
    cat >&2 <<EOF
  curl -s http://$DYN_HTTP_HOST:$DYN_HTTP_PORT/v1/embeddings -H 'Content-Type: application/json'$key \\
    -d '{"model": "$SERVED_MODEL_NAME", "input": "a yellow heart"}'

EOF
}

# Starts every child that ends again, each time a little later if it keeps ending at once; no child waits for
# another one's pause. Never returns.
supervise() {
    local index status ended reported tick=
    while true; do
        # Of children that are killed in the same instant bash reports one and forgets the others: each is looked
        # for after every report, and when none has come for a while.
        if ! kill -0 "$tick" 2>/dev/null; then
            sleep 5 &
            tick=$!
        fi
        reported=0 ended=
        # Bash would report a killed child in words of its own.
        wait -n -p ended "$tick" "${PIDS[@]}" 2>/dev/null || reported=$?
        for index in "${!PIDS[@]}"; do
            status=$reported
            if [[ ${PIDS[index]} != "${ended:-}" ]]; then
                if kill -0 "${PIDS[index]}" 2>/dev/null; then continue; fi
                status=0
                wait "${PIDS[index]}" 2>/dev/null || status=$?
            fi
            replace "$index" "$status"
        done
    done
}

# replace INDEX STATUS: what comes after a child that has ended: a pause, and after the pause the child again.
replace() {
    local index=$1 status=$2 tell=say
    if [[ -n ${PAUSING[index]} ]]; then
        eval "deaf_to_the_terminal ${COMMANDS[index]} &"
        PAUSING[index]=
        STARTED[index]=$SECONDS
        DELAYS[index]=$((DELAYS[index] < 16 ? DELAYS[index] * 2 : 30))
    else
        if ((SECONDS - STARTED[index] > 60)); then DELAYS[index]=1; fi
        # One that was told to end, for a rolling restart, ends with 0.
        if ((status != 0)); then tell=complain; fi
        "$tell" "${NAMES[index]} (pid ${PIDS[index]}) ended with status $status;" \
            "starting it again in ${DELAYS[index]} s"
        sleep "${DELAYS[index]}" &
        PAUSING[index]=yes
    fi
    PIDS[index]=$!
}
