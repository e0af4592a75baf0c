//! The programs that drain, each started as its users start it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::backlog::{Backlog, PUBLICATION, folder};
use crate::support::servers::{self, Postgres};
use crate::support::worker;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contender {
    /// `pg_recvlogical` to /dev/null: decoding and sending, and nothing done with it.
    Floor,
    Tailer,
}

impl Contender {
    pub fn name(self) -> &'static str {
        match self {
            Contender::Floor => "pg_recvlogical",
            Contender::Tailer => "outbox-tailer",
        }
    }
}

/// How the contender reaches PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Unix,
}

impl Transport {
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Unix => "unix",
        }
    }

    /// Host for libpq and for the worker.
    fn host(self, backlog: &Backlog) -> String {
        match self {
            Transport::Tcp => "127.0.0.1".to_owned(),
            Transport::Unix => backlog.socket.to_str().unwrap().to_owned(),
        }
    }
}

/// One run of a contender: what it reads and where it writes.
pub struct Job<'a> {
    pub backlog: &'a Backlog,
    pub transport: Transport,
    pub slot: &'a str,
    pub brokers: &'a str,
    pub topic: &'a str,
}

impl Job<'_> {
    /// Ends by itself at the end of the backlog.
    pub fn pg_recvlogical(&self) -> Command {
        let mut command = Command::new(Postgres::programs().join("pg_recvlogical"));
        command
            .args(["--start", "--no-loop", "-f", "/dev/null", "-U", "postgres", "-d", self.backlog.database()])
            .args(["-h", &self.transport.host(self.backlog), "-p", &self.backlog.server.port.to_string()])
            .args(["--slot", self.slot, "--endpos", &self.backlog.end.to_string()])
            .args(["-o", "proto_version=1", "-o", &format!("publication_names={PUBLICATION}")]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// The worker's configuration, with the slot taken over; nothing is tuned.
    pub fn tailer_config(&self) -> PathBuf {
        let config = folder("tailer").join("outbox-tailer.toml");
        let mut text = String::new();
        let url = format!(
            "host={} port={} user=postgres dbname={}",
            self.transport.host(self.backlog),
            self.backlog.server.port,
            self.backlog.database()
        );
        let slot = self.slot;
        writeln!(text, "[postgres]\nurl = {url:?}\nslot = {slot:?}\npublication = {PUBLICATION:?}").unwrap();
        writeln!(text, "[kafka]\nbrokers = {:?}", self.brokers).unwrap();
        writeln!(text, "[[outbox]]\ntable = 'public.outbox_event'\ntopic = {:?}", self.topic).unwrap();
        std::fs::write(&config, text).unwrap();
        let ended = worker::run(&config, &["init", "--adopt-slot", slot]);
        assert_eq!(ended.code, Some(0), "init: {}", ended.stderr);
        config
    }

    pub fn tailer(&self, config: &Path) -> Command {
        worker::program(config, &["--log-format", "json", "run"])
    }
}

/// The versions that the figures are of.
pub fn versions() -> String {
    let first_line = |command: &mut Command| {
        let output = command.output().map(|o| o.stdout).unwrap_or_default();
        String::from_utf8_lossy(&output).lines().next().unwrap_or_default().to_owned()
    };
    let git = first_line(Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(servers::ROOT));
    let postgres = first_line(Command::new(Postgres::programs().join("postgres")).arg("--version"));
    format!("outbox-tailer {git}, {postgres}, Apache Kafka 4.4.0")
}
