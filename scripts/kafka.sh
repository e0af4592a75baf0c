#!/usr/bin/env bash
# A development Apache Kafka (KRaft), fetched with Maven and run below .dev/ (or $OUTBOX_DEV_DIR).
#
#   kafka.sh fetch                             fetch the jars; the last line printed is their directory
#   kafka.sh start DIR PORT [property=value..] run a broker, wait until it serves, print 127.0.0.1:PORT
#   kafka.sh stop DIR [TERM|KILL]              end it and wait until it is gone
#
# Exit codes: 1 failed, 2 wrong usage, 3 no Kafka to be had here (no Java 17+, no Maven, no registry).
# Environment: OUTBOX_DEV_DIR; KAFKA_HEAP_OPTS (JVM options); KAFKA_CLUSTER_ID and KAFKA_FORMAT_ARGS
# (the cluster id and further `storage format` arguments, for the first start on a DIR).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dev=$(realpath -m "${OUTBOX_DEV_DIR:-$here/../.dev}")
pom=$here/kafka-pom.xml
libs=$dev/kafka/libs

die() { local code=$1; shift; echo "kafka.sh: $*" >&2; exit "$code"; }
usage() { sed -n '4,6s/^# *//p' "${BASH_SOURCE[0]}" >&2; exit 2; }

java=java
if [[ -n ${JAVA_HOME:-} && -x $JAVA_HOME/bin/java ]]; then java=$JAVA_HOME/bin/java; fi

need_java() {
  local version
  version=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1) || true
  [[ -n $version ]] || die 3 "no Kafka here: java is not installed (Java 17 or newer is needed)"
  ((version >= 17)) || die 3 "no Kafka here: Java $version found, 17 or newer is needed"
}

# The copied pom is the stamp: a pom that has changed since fetches anew.
fetched() { cmp -s "$pom" "$libs/pom.xml"; }

tmp=
trap 'if [[ -n $tmp ]]; then rm -rf "$tmp"; fi' EXIT

fetch() {
  need_java
  if ! fetched; then
    command -v mvn >/dev/null || die 3 "no Kafka here: mvn is not installed"
    mkdir -p "$dev/kafka"
    tmp=$(mktemp -d "$dev/kafka/fetch.XXXXXX")
    mvn -q -B -Dstyle.color=never -f "$pom" dependency:copy-dependencies -DincludeScope=runtime \
      -DoutputDirectory="$tmp/libs" </dev/null >"$tmp/log" 2>&1 ||
      die 3 "no Kafka here: Maven could not fetch it: $(sed -n '/ERROR/{s/^.*\[ERROR\] *//p;q}' "$tmp/log" | cut -c 1-300)"
    cp "$pom" "$tmp/libs/pom.xml"
    # One rename, so that no reader sees half a directory; when another fetch was first, its result serves.
    if ! fetched; then
      if [[ -e $libs ]]; then mv -T "$libs" "$tmp/old" || true; fi
      mv -T "$tmp/libs" "$libs" 2>/dev/null || fetched || die 1 "cannot write $libs"
    fi
  fi
  echo "$libs"
}

# Is process $1 the broker of $dir? A pid may have been given to another program since.
is_ours() { tr '\0' '\n' 2>/dev/null <"/proc/$1/cmdline" | grep -qxF "$dir/server.properties"; }

# A killed process keeps its ports and locks until its last thread ends; one that nobody reaps stays a zombie.
is_gone() {
  local tasks
  [[ -d /proc/$1 ]] || return 0
  # A thread that ends while they are listed makes find fail: that says nothing about the process.
  tasks=$(find "/proc/$1/task" -mindepth 1 -maxdepth 1 2>/dev/null | wc -l) || true
  [[ -d /proc/$1 ]] || return 0
  ((tasks <= 1)) && ! grep -q '[^[:space:]]' <(tr -d '\0' 2>/dev/null <"/proc/$1/cmdline")
}

# until_true SECONDS COMMAND...
until_true() {
  local end=$((SECONDS + $1)); shift
  until "$@"; do
    ((SECONDS < end)) || return 1
    sleep 0.1
  done
}

port_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

start() {
  if (($# < 2)) || [[ ! $2 =~ ^[0-9]+$ ]]; then usage; fi
  dir=$(realpath -m "$1")
  local port=$2 arg pid
  shift 2
  local -A given=()
  for arg; do
    [[ $arg == *=* ]] || die 2 "not a property=value: $arg"
    given[${arg%%=*}]=${arg#*=}
  done

  need_java
  fetched || fetch >/dev/null
  mkdir -p "$dir"
  if [[ -s $dir/kafka.pid ]]; then
    pid=$(<"$dir/kafka.pid")
    if is_ours "$pid"; then die 1 "already running on $dir (pid $pid)"; fi
    # After a kill -9 the old process may still be going.
    until_true 2 port_free "$port" || true
  fi
  port_free "$port" || die 1 "port $port is in use"

  # The controller's port: what controller.quorum.voters says of this node, else the last start's, else a free
  # one below the range that outgoing connections take theirs from.
  local id=${given[node.id]:-1} roles=${given[process.roles]:-broker,controller} cport=
  if [[ ,${given[controller.quorum.voters]:-} =~ ,${id}@[^,]*:([0-9]+) ]]; then
    cport=${BASH_REMATCH[1]}
    port_free "$cport" || die 1 "controller port $cport is in use"
  elif [[ -s $dir/server.properties ]]; then
    cport=$(sed -n 's#^listeners=.*CONTROLLER://[^,]*:\([0-9]*\).*#\1#p' "$dir/server.properties" | tail -n 1)
  fi
  while [[ -z $cport || $cport == "$port" ]] || ! port_free "$cport"; do cport=$((20000 + RANDOM % 12000)); done

  # A given `listeners` may leave the controller's to us.
  local listeners=${given[listeners]:-}
  if [[ -z $listeners && $roles == *broker* ]]; then listeners=PLAINTEXT://127.0.0.1:$port; fi
  if [[ $roles == *controller* && $listeners != *CONTROLLER://* ]]; then
    listeners+=${listeners:+,}CONTROLLER://127.0.0.1:$cport
  fi
  unset 'given[listeners]'

  # In a properties file the last word wins, so what was given comes last.
  {
    cat <<END
node.id=$id
process.roles=$roles
controller.quorum.voters=$id@127.0.0.1:$cport
controller.listener.names=CONTROLLER
listeners=$listeners
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL
log.dirs=$dir/data
num.partitions=6
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
# One node has to do for the internal topics, and few partitions make them quick.
offsets.topic.replication.factor=1
offsets.topic.num.partitions=5
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=5
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=5
# A test must never lose what it wrote to age or size.
log.retention.ms=-1
log.retention.bytes=-1
# After a kill -9 the controller lets the broker in again only once its old session has run out (default: 9 s).
broker.heartbeat.interval.ms=400
broker.session.timeout.ms=2000
log.cleaner.dedupe.buffer.size=16777216
END
    for arg in "${!given[@]}"; do printf '%s=%s\n' "$arg" "${given[$arg]}"; done
  } >"$dir/server.properties"

  cat >"$dir/log4j2.properties" <<'END'
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=[%d] %p %m (%c)%n
rootLogger.level=WARN
rootLogger.appenderRef.out.ref=out
logger.started.name=kafka.server.KafkaRaftServer
logger.started.level=INFO
END

  local log=$dir/kafka.log
  local data=${given[log.dirs]:-$dir/data}
  local -a run=("$java")
  # shellcheck disable=SC2206 # these are lists of words
  run+=(${KAFKA_HEAP_OPTS:--Xms128m -Xmx512m -XX:+UseSerialGC})
  run+=("-Dlog4j2.configurationFile=$dir/log4j2.properties" -Djava.awt.headless=true -cp "$libs/*")

  # The log goes on from start to start; only what this one adds counts.
  touch "$log"
  local seen; seen=$(stat -c %s "$log")
  added() { tail -c "+$((seen + 1))" "$log"; }
  complaint() { echo "$(added | grep -m 1 -E 'Exception|Error|ERROR|FATAL' | cut -c 1-300) (see $log)"; }

  if [[ ! -e ${data%%,*}/meta.properties ]]; then
    local cluster=${KAFKA_CLUSTER_ID:-}
    # What `StorageTool random-uuid` makes, without the second that another JVM takes.
    while [[ -z $cluster || $cluster == -* ]]; do
      cluster=$(head -c 16 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=')
    done
    # shellcheck disable=SC2086 # a list of words
    "${run[@]}" kafka.tools.StorageTool format --ignore-formatted -t "$cluster" -c "$dir/server.properties" \
      ${KAFKA_FORMAT_ARGS:-} </dev/null >>"$log" 2>&1 || die 1 "cannot format the storage: $(complaint)"
    seen=$(stat -c %s "$log")
  fi

  (
    # The broker outlives us: it must hold none of our caller's pipes or locks open.
    for fd in /proc/self/fd/*; do
      fd=${fd##*/}
      if ((fd > 2 && fd < 255)); then eval "exec $fd>&-"; fi
    done
    cd "$dir"
    exec setsid "${run[@]}" kafka.Kafka "$dir/server.properties" </dev/null >>"$log" 2>&1
  ) </dev/null >/dev/null 2>&1 &
  pid=$!
  echo "$pid" >"$dir/kafka.pid"

  ready() { grep -q 'Kafka Server started' <(added); }
  # shellcheck disable=SC2317 # until_true calls it
  # Twice, because a process has no command line for a moment while it becomes another program.
  settled() { ready || { is_gone "$pid" && sleep 0.2 && is_gone "$pid"; }; }
  until_true 60 settled || { stop "$dir" KILL; die 1 "not ready after 60 s, see $log"; }
  if ! ready; then
    rm -f "$dir/kafka.pid"
    die 1 "the broker ended: $(complaint)"
  fi
  echo "127.0.0.1:$port"
}

stop() {
  local signal=${2:-TERM} pid
  if (($# < 1)) || [[ $signal != TERM && $signal != KILL ]]; then usage; fi
  dir=$(realpath -m "$1")
  [[ -s $dir/kafka.pid ]] || return 0
  pid=$(<"$dir/kafka.pid")
  if is_ours "$pid"; then
    kill "-$signal" "$pid" 2>/dev/null || true
    kill -CONT "$pid" 2>/dev/null || true # a stopped process would never act on TERM
    # A broker that lost its quorum could wait for minutes to be allowed to go.
    until_true 30 is_gone "$pid" || { kill -KILL "$pid" 2>/dev/null; until_true 10 is_gone "$pid"; } ||
      die 1 "pid $pid does not end"
  fi
  rm -f "$dir/kafka.pid"
}

case ${1:-} in
  fetch | start | stop) "$@" ;;
  *) usage ;;
esac
