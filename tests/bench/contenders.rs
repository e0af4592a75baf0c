//! The programs that drain, each started as its users start it.

use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::backlog::{Backlog, PUBLICATION};
use crate::processes;
use crate::site::Site;
use crate::support::servers::{self, Postgres};
use crate::support::{within, worker};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contender {
    /// `pg_recvlogical` to /dev/null: the server decodes and sends, and nothing is done with it.
    Floor,
    Tailer,
    /// The worker into librdkafka's mock broker: what is left when no real Kafka takes processor time.
    TailerMock,
    Debezium,
}

impl Contender {
    pub fn name(self) -> &'static str {
        match self {
            Contender::Floor => "pg_recvlogical",
            Contender::Tailer => "outbox-tailer",
            Contender::TailerMock => "outbox-tailer-mock",
            Contender::Debezium => "debezium",
        }
    }
}

/// How the contender reaches PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Unix,
    /// From a network namespace of its own, to PostgreSQL and to Kafka.
    Veth,
    /// Loopback, with a server that has TLS.
    Tls,
}

impl Transport {
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Unix => "unix",
            Transport::Veth => "veth",
            Transport::Tls => "tls",
        }
    }
}

/// What a contender reads and where it writes.
pub struct Job<'a> {
    pub site: &'a Site,
    pub backlog: &'a Backlog,
    pub transport: Transport,
    pub slot: &'a str,
    pub brokers: &'a str,
    pub topic: &'a str,
    /// Debezium's producer waits so long for more; the worker's setting is its own.
    pub linger_ms: u32,
}

impl Job<'_> {
    /// Everything that an operator would have done before; then the command that is measured.
    pub fn prepare(&self, contender: Contender, folder: &Path) -> Command {
        let command = match contender {
            Contender::Floor => self.pg_recvlogical(),
            Contender::Tailer => {
                worker::program(&self.adopt(folder, "kafka"), &["--log-format", "json", "run"])
            }
            Contender::TailerMock => {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.arg("worker-for-the-mock-broker").arg(self.adopt(folder, "none"));
                command
            }
            Contender::Debezium => self.connect(folder),
        };
        match (self.transport, &self.site.veth) {
            (Transport::Veth, Ok(veth)) => veth.enter(&command),
            _ => command,
        }
    }

    /// Ends by itself at the end of the backlog.
    fn pg_recvlogical(&self) -> Command {
        let mut command = Command::new(Postgres::programs().join("pg_recvlogical"));
        command
            .args([
                "--start",
                "--no-loop",
                "-f",
                "/dev/null",
                "-U",
                "postgres",
                "-d",
                self.backlog.database(),
            ])
            .args(["-h", &self.host(), "-p", &self.backlog.server.port.to_string()])
            .args(["--slot", self.slot, "--endpos", &self.backlog.end.to_string()])
            .args(["-o", "proto_version=1", "-o", &format!("publication_names={PUBLICATION}")]);
        if self.transport == Transport::Tls {
            // The build with all programs has no TLS; the library of the server that has it fits.
            let library = servers::programs_of("18").parent().unwrap().join("lib");
            command.env("LD_PRELOAD", library.join("libpq.so.5")).env("LD_LIBRARY_PATH", library);
            command.env("PGSSLMODE", "require");
        }
        command
    }

    /// Writes the worker's configuration and takes the slot over. Nothing is tuned; the mock broker cannot
    /// hold a witness.
    fn adopt(&self, folder: &Path, witness: &str) -> PathBuf {
        let config = folder.join("outbox-tailer.toml");
        let mut text = String::new();
        let url = format!(
            "host={} port={} user=postgres dbname={}",
            self.host(),
            self.backlog.server.port,
            self.backlog.database()
        );
        let tls_mode = if self.transport == Transport::Tls { "require" } else { "disable" };
        let slot = self.slot;
        writeln!(text, "[postgres]\nurl = {url:?}\nslot = {slot:?}\npublication = {PUBLICATION:?}").unwrap();
        writeln!(text, "tls_mode = {tls_mode:?}\n[kafka]\nbrokers = {:?}", self.brokers).unwrap();
        writeln!(text, "[witness]\nkind = {witness:?}").unwrap();
        writeln!(text, "[[outbox]]\ntable = 'public.outbox_event'\ntopic = {:?}", self.topic).unwrap();
        std::fs::write(&config, text).unwrap();
        // Once for each slot: a later start finds its row.
        let init = worker::program(&config, &["init", "--adopt-slot", slot]);
        let mut init = match (self.transport, &self.site.veth) {
            (Transport::Veth, Ok(veth)) => veth.enter(&init),
            _ => init,
        };
        let output = init.output().unwrap();
        assert!(output.status.success(), "init: {}", String::from_utf8_lossy(&output.stderr));
        config
    }

    /// Kafka Connect, standalone, with Debezium's outbox event router: the settings that were found to
    /// be the fastest without loss of safety.
    fn connect(&self, folder: &Path) -> Command {
        let connect = self.site.connect.as_ref().expect("only planned where there is one");
        let worker = format!(
            "bootstrap.servers={brokers}
key.converter=org.apache.kafka.connect.storage.StringConverter
value.converter=org.apache.kafka.connect.storage.StringConverter
offset.storage.file.filename={folder}/offsets
offset.flush.interval.ms=1000
plugin.path={plugins}
plugin.discovery=service_load
listeners=http://127.0.0.1:{port}
topic.creation.enable=false
producer.acks=all
producer.enable.idempotence=true
producer.batch.size=262144
producer.linger.ms={linger_ms}
",
            brokers = self.brokers,
            folder = folder.display(),
            plugins = connect.join("plugins").display(),
            port = servers::free_port(),
            linger_ms = self.linger_ms,
        );
        let connector = format!(
            "name=bench
connector.class=io.debezium.connector.postgresql.PostgresConnector
tasks.max=1
database.hostname={host}
database.port={port}
database.user=postgres
database.dbname={database}
topic.prefix=bench
plugin.name=pgoutput
slot.name={slot}
publication.name={PUBLICATION}
publication.autocreate.mode=disabled
snapshot.mode=no_data
table.include.list=public.outbox_event
tombstones.on.delete=false
max.batch.size=8192
max.queue.size=32768
poll.interval.ms=10
transforms=outbox
transforms.outbox.type=io.debezium.transforms.outbox.EventRouter
transforms.outbox.table.field.event.id=event_id
transforms.outbox.table.field.event.key=order_id
transforms.outbox.table.field.event.payload=payload
transforms.outbox.table.fields.additional.placement=event_type:header:eventType,revision:header:revision
transforms.outbox.route.by.field=event_type
transforms.outbox.route.topic.replacement={topic}
",
            host = self.host(),
            port = self.backlog.server.port,
            database = self.backlog.database(),
            slot = self.slot,
            topic = self.topic,
        );
        // Its statistics queue warns of every event when it is full.
        let logs = "appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=[%d] %p %m (%c)%n
rootLogger.level=ERROR
rootLogger.appenderRef.out.ref=out
";
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let logs = write("log4j2.properties", logs);
        let mut command = Command::new("java");
        command
            .args(["-Xms256m", "-Xmx1g"])
            .arg(format!("-Dlog4j2.configurationFile={}", logs.display()))
            .arg("-cp")
            .arg(format!("{}/*", connect.join("libs").display()))
            .arg("org.apache.kafka.connect.cli.ConnectStandalone")
            .arg(write("worker.properties", &worker))
            .arg(write("connector.properties", &connector))
            .current_dir(folder);
        command
    }

    /// Host for libpq, for the worker and for JDBC.
    fn host(&self) -> String {
        match (self.transport, &self.site.veth) {
            (Transport::Unix, _) => self.backlog.socket.to_str().unwrap().to_owned(),
            (Transport::Veth, Ok(veth)) => veth.address.clone(),
            _ => "127.0.0.1".to_owned(),
        }
    }
}

/// A process that was started here, with its output in a file; killed when dropped.
pub struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    pub fn start(mut command: Command, folder: &Path) -> Self {
        let log = folder.join("log");
        let file = File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        Running { child: command.spawn().unwrap(), log }
    }

    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Without asking for its exit status, so that /proc still has its times.
    pub fn has_ended(&self) -> bool {
        processes::has_ended(self.pid())
    }

    /// Waits until it has ended well; being ended by our own signal is well.
    pub fn wait(&mut self) -> Result<(), String> {
        let limit = Duration::from_secs(60);
        let status = within(limit, "the process ends", &mut || self.child.try_wait().unwrap());
        let terminated = status.signal() == Some(15) || status.code() == Some(128 + 15);
        if status.success() || terminated { Ok(()) } else { Err(format!("{status}: {}", self.last_words())) }
    }

    pub fn stop(&mut self) -> Result<(), String> {
        if !self.has_ended() {
            let _ = Command::new("kill").args(["-s", "TERM", &self.pid().to_string()]).status();
        }
        self.wait()
    }

    pub fn last_words(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or_default().chars().take(300).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The versions that the figures are of.
pub fn versions(site: &Site) -> String {
    let first_line = |command: &mut Command| {
        let output = command.output().map(|o| o.stdout).unwrap_or_default();
        String::from_utf8_lossy(&output).lines().next().unwrap_or_default().to_owned()
    };
    let commit = ["describe", "--always", "--dirty"];
    let commit = first_line(Command::new("git").args(commit).current_dir(servers::ROOT));
    let postgres = first_line(Command::new(Postgres::programs().join("postgres")).arg("--version"));
    let mut text = format!("outbox-tailer {commit}, {postgres}, Apache Kafka 4.4.0");
    if let Ok(connect) = &site.connect {
        let plugin =
            std::fs::read_dir(connect.join("plugins/debezium-connector-postgres")).into_iter().flatten();
        let names = plugin.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut versions = names.filter_map(|name| {
            Some(name.strip_prefix("debezium-connector-postgres-")?.strip_suffix(".jar")?.to_owned())
        });
        write!(text, ", Debezium {}", versions.next().unwrap_or_default()).unwrap();
    }
    text
}
