#!/usr/bin/env bash
# A federation on one machine, over TLS: a server, two clients that build the model, one that has an export. See README.md.
#
#     examples/three-clients/run.sh [FOLDER]      FOLDER: a new folder to keep everything in (default: a temporary one)
#
# Set PORT, ROUNDS and the first client's RUNTIME in the environment to change them.
set -eum  # m: so that background processes can be interrupted

rounds=${ROUNDS:-20}
port=${PORT:-$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
export OMP_NUM_THREADS=1  # four processes share this machine

if [ $# -gt 0 ]; then
    folder=$1 temporary=
    mkdir "$folder"
else
    folder=$(mktemp -d) temporary=yes
fi

clean_up() {
    jobs -p | while read -r process; do kill -INT "$process" 2>/dev/null || true; done
    wait
    [ -z "$temporary" ] || rm -r "$folder"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

join() {  # NUMBER OPTIONS…: starts a client with its own keys and state; it takes its part of the digits
    local number=$1
    shift
    baffle join "localhost:$port" --keys "$folder/keys/client-$number" --state "$folder/state-$number" --part "$@" \
        2>"$folder/client-$number.log" &
}

baffle keys new "$folder/keys" --clients 3
baffle export digits --set federation.clients=3 --out "$folder/model" >"$folder/export.log"

baffle serve digits --set rounds="$rounds" --keys "$folder/keys/server" --out "$folder/run" \
    --host 127.0.0.1 --port "$port" &
join 0 --runtime "${RUNTIME:-onnx}"
join 1
join 2 --model "$folder/model"

for _ in server 0 1 2; do
    wait -n || { tail -n 1 "$folder"/client-?.log >&2; exit 1; }  # if one fails, end all
done
cat "$folder"/client-?.log
baffle verify "$folder/run"
