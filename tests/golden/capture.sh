#!/usr/bin/env bash
# Writes pgoutput-NN.txt for each PostgreSQL major given (default: 14 to 18) by
# running scenario.sql on a server of its own. The end of scenario.sql says what
# the files hold.
set -euo pipefail
shopt -s inherit_errexit

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
postgres=$here/../../scripts/postgres.sh
dev=${OUTBOX_DEV_DIR:-$here/../../.dev}

mkdir -p "$dev"
work=$(mktemp -d "$dev/golden-XXXXXX")
chmod 755 "$work"
major=
finish() {
    [ -z "$major" ] || "$postgres" stop "$work/pg$major" immediate || true
    rm -rf "$work"
}
trap finish EXIT

# psql reads neither the caller's locale nor its settings.
export PGCLIENTENCODING=UTF8 PGOPTIONS="" PGTZ=UTC PGDATESTYLE=ISO

[ $# -gt 0 ] || set -- 14 15 16 17 18
for major in "$@"; do
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    # Autovacuum's own transactions would show up as empty ones in version 14.
    "$postgres" start "$major" "$work/pg$major" "$port" autovacuum=off >/dev/null
    "$postgres" psql "$port" -f "$here/scenario.sql"
    "$postgres" psql "$port" -At -F ' ' -v ON_ERROR_STOP=1 -o "$work/lines" -c "
        SELECT lsn, xid, encode(data, 'hex')
        FROM pg_logical_slot_get_binary_changes('golden', NULL, NULL,
            'proto_version', '1', 'publication_names', 'golden', 'messages', 'true')"
    version=$("$postgres" psql "$port" -Atc 'SHOW server_version')
    # Counts of messages by type byte: B=33 C=33 ...
    counts=$(cut -d ' ' -f 3 "$work/lines" | cut -c 1-2 | sort | uniq -c |
        while read -r count type; do printf " %b=%s" "\\x$type" "$count"; done)
    {
        printf '# PostgreSQL %s, pgoutput: proto_version 1, messages true\n' "$version"
        printf '# scenario.sql, captured by capture.sh: <lsn> <xid> <hex of one message>\n'
        printf '# messages:%s\n' "$counts"
        cat "$work/lines"
    } >"$work/golden"
    mv "$work/golden" "$here/pgoutput-$major.txt"
    "$postgres" stop "$work/pg$major" immediate
    echo "pgoutput-$major.txt: PostgreSQL $version,$counts"
    major=
done
