#!/usr/bin/env bash
# Kafka Connect with Debezium's PostgreSQL connector, for the benchmark: fetched with Maven into .dev/ (or
# $OUTBOX_DEV_DIR). Connect's jars and the connector's stay apart, because their Jackson versions differ.
#
#   connect.sh fetch     the last line printed is a directory with libs/ (Connect) and plugins/ (Debezium)
#
# Exit codes: 1 failed, 2 wrong usage, 3 not to be had here (no Java 17+, no Maven, no registry).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dev=$(realpath -m "${OUTBOX_DEV_DIR:-$here/../.dev}")
pom=$here/connect-pom.xml
out=$dev/connect

die() { local code=$1; shift; echo "connect.sh: $*" >&2; exit "$code"; }
[ "${1:-}" = fetch ] || { sed -n '5s/^# *//p' "${BASH_SOURCE[0]}" >&2; exit 2; }

# The copied pom is the stamp: a pom that has changed since fetches anew.
if ! cmp -s "$pom" "$out/pom.xml"; then
  "$here/kafka.sh" fetch >/dev/null # checks Java and Maven
  command -v mvn >/dev/null || die 3 "no Debezium here: mvn is not installed"
  mkdir -p "$dev"
  tmp=$(mktemp -d "$dev/connect.XXXXXX")
  trap 'rm -rf "$tmp"' EXIT
  maven() {
    mvn -q -B -Dstyle.color=never -f "$pom" "$@" </dev/null >"$tmp/log" 2>&1 ||
      die 3 "no Debezium here: Maven could not fetch it: $(sed -n '/ERROR/{s/^.*\[ERROR\] *//p;q}' "$tmp/log" | cut -c 1-300)"
  }
  maven dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$tmp/out/libs"
  maven dependency:unpack -DoutputDirectory="$tmp/out/plugins" -DmarkersDirectory="$tmp/markers"
  cp "$pom" "$tmp/out/pom.xml"
  rm -rf "$out"
  mv -T "$tmp/out" "$out"
fi
echo "$out"
