#!/usr/bin/env bash
# make demo: starts what is not given, runs `outbox-tailer demo`, leaves nothing running.
#   EVENTS=n        end after n events
#   RATE=n          events a second
#   DATABASE_URL    a PostgreSQL of your own (a superuser; the demo makes and drops a database)
#   KAFKA_BROKERS   a Kafka of your own (the demo makes and deletes a topic)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
dev=${OUTBOX_DEV_DIR:-$root/.dev}

if [ -n "${DEMO_PROGRAM:-}" ]; then
    program=$DEMO_PROGRAM
else
    cargo build --quiet --features "$(scripts/cargo-features.sh)"
    program=${CARGO_TARGET_DIR:-target}/debug/outbox-tailer
fi

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

work=${DEMO_WORK:-$dev/demo-$$}
stop() {
    trap - EXIT
    if [ -z "${KAFKA_BROKERS:-}" ] && [ -d "$work/kafka" ]; then scripts/kafka.sh stop "$work/kafka" || true; fi
    if [ -z "${DATABASE_URL:-}" ] && [ -d "$work/postgres" ]; then scripts/postgres.sh stop "$work/postgres" || true; fi
    rm -rf "$work"
}
trap stop EXIT
# Ctrl-C reaches the program, too: it ends by itself, then the servers are stopped.
trap : INT TERM

mkdir -p "$work"
url=${DATABASE_URL:-}
if [ -z "$url" ]; then
    port=$(free_port)
    scripts/postgres.sh start 18.6 "$work/postgres" "$port" >/dev/null
    url=postgres://postgres@127.0.0.1:$port/postgres
fi
brokers=${KAFKA_BROKERS:-}
if [ -z "$brokers" ]; then
    if brokers=$(scripts/kafka.sh start "$work/kafka" "$(free_port)"); then
        :
    elif [ $? -eq 3 ]; then
        brokers= # no Kafka to be had: the program starts a mock broker, and says so
    else
        exit 1
    fi
fi

arguments=(--database-url "$url")
if [ -n "$brokers" ]; then arguments+=(--brokers "$brokers"); fi
arguments+=(demo)
if [ -n "${EVENTS:-}" ]; then arguments+=(--events "$EVENTS"); fi
if [ -n "${RATE:-}" ]; then arguments+=(--rate "$RATE"); fi
status=0
"$program" "${arguments[@]}" || status=$?
stop
exit "$status"
