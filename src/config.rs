//! Raw file + environment + flags → validated settings.
//!
//! Precedence: a flag wins over `OUTBOX_TAILER_...`, which wins over the file, which wins over the
//! default. `PG*` variables are not read. Unknown keys are refused with the nearest known name.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::relay::outbox::ColumnName;
use crate::relay::router::{ID_HEADER, Timestamp};

/// Text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl<'de> Deserialize<'de> for Secret {
    /// Serde's own message would quote a number that stands where a text is wanted.
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match toml::Value::deserialize(from)? {
            toml::Value::String(text) => Ok(Secret(text)),
            _ => Err(serde::de::Error::custom("a password must be a text in quotes")),
        }
    }
}

impl Secret {
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<secret>")
    }
}

#[derive(Debug, Clone)]
pub struct Config {
    pub postgres: Postgres,
    pub kafka: Kafka,
    pub tables: Vec<TableConfig>,
    pub witness: Witness,
    pub worker: Worker,
}

/// Where it is kept, outside the database, how far has been published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Witness {
    /// A compacted topic beside the events.
    Kafka {
        topic: String,
    },
    File(PathBuf),
    /// What a failover or a restore has lost then shows only to a worker that was running meanwhile.
    None,
}

#[derive(Debug, Clone)]
pub struct Postgres {
    /// Hosts, ports, user, database; the password only when it stands in the URL.
    pub url: tokio_postgres::Config,
    pub tls: Tls,
    password: Option<Secret>,
    password_file: Option<PathBuf>,
    pub slot: String,
    pub publication: String,
    pub failover: Option<bool>,
    pub connect_timeout: Duration,
    /// A connection that says nothing for so long, although asked, is given up.
    pub silence_timeout: Duration,
    /// `SO_RCVBUF` of the replication connection; 0 leaves it to the kernel.
    pub receive_buffer_bytes: Option<usize>,
}

impl Postgres {
    /// Read anew at each connect, so that a rotated password is picked up.
    ///
    /// # Errors
    /// When the password file cannot be read.
    pub fn password(&self) -> Result<Option<Vec<u8>>> {
        let given =
            read_secret(self.password.as_ref(), self.password_file.as_deref(), "postgres.password_file")?;
        Ok(given.map(|s| s.0.into_bytes()).or_else(|| self.url.get_password().map(<[u8]>::to_vec)))
    }
}

#[derive(Debug, Clone, Default)]
pub struct Tls {
    /// `None`: verify-full, but prefer on loopback and Unix sockets.
    pub mode: Option<TlsMode>,
    pub ca_file: Option<PathBuf>,
    pub certificate_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
}

/// libpq's `sslmode` (PostgreSQL manual, "SSL Support"), without `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TlsMode {
    Disable,
    /// TLS if the server has it, unverified.
    Prefer,
    /// TLS, unverified; with a CA file the same as verify-ca, as in libpq.
    Require,
    VerifyCa,
    VerifyFull,
}

#[derive(Debug, Clone)]
pub struct Kafka {
    pub brokers: String,
    /// librdkafka properties given by the operator, without those the promise rests on.
    pub properties: BTreeMap<String, String>,
    /// Whether the brokers can tell their limits; librdkafka's mock broker cannot.
    pub knows_limits: bool,
    sasl_password: Option<Secret>,
    sasl_password_file: Option<PathBuf>,
}

impl Kafka {
    /// Read anew whenever a producer is built.
    ///
    /// # Errors
    /// When the password file cannot be read.
    pub fn sasl_password(&self) -> Result<Option<Secret>> {
        read_secret(
            self.sasl_password.as_ref(),
            self.sasl_password_file.as_deref(),
            "kafka.sasl_password_file",
        )
    }

    pub fn compresses(&self) -> bool {
        self.properties.get("compression.type").is_some_and(|codec| codec != "none")
    }
}

#[derive(Debug, Clone)]
pub struct TableConfig {
    pub schema: String,
    pub table: String,
    pub topic: String,
    pub id: ColumnName,
    pub key: ColumnName,
    pub payload: ColumnName,
    pub headers: Vec<(String, ColumnName)>,
    pub timestamp: Timestamp,
}

impl TableConfig {
    /// For messages and as the key of recorded facts; not for SQL.
    pub fn name(&self) -> String {
        format!("{}.{}", self.schema, self.table)
    }

    pub fn columns(&self) -> impl Iterator<Item = &ColumnName> {
        [&self.id, &self.key, &self.payload].into_iter().chain(self.headers.iter().map(|(_, column)| column))
    }
}

#[derive(Debug, Clone)]
pub struct Worker {
    /// Names this process in logs, in the position row and to PostgreSQL.
    pub instance: String,
    pub window_events: usize,
    pub window_bytes: usize,
    /// Least time between two writes of the position.
    pub position_interval: Duration,
    /// Least time between two position writes that only follow foreign WAL.
    pub idle_interval: Duration,
    /// At shutdown, how long to wait for acknowledgements.
    pub shutdown_timeout: Duration,
    pub reconnect_max: Duration,
    pub exit_on_refusal: bool,
}

/// librdkafka's second names; which of two wins is left to chance there.
const ALIASES: &[(&str, &str)] = &[
    ("compression.codec", "compression.type"),
    ("max.in.flight", "max.in.flight.requests.per.connection"),
    ("queue.buffering.max.ms", "linger.ms"),
    ("sasl.mechanisms", "sasl.mechanism"),
];

/// librdkafka properties that the promise rests on; design: idempotence, stop-the-line, bounds.
const FIXED_PROPERTIES: &[&str] = &[
    "acks",
    "allow.auto.create.topics",
    "bootstrap.servers",
    "delivery.report.only.error",
    "delivery.timeout.ms",
    "enable.gapless.guarantee",
    "enable.idempotence",
    "message.send.max.retries",
    "message.timeout.ms",
    "metadata.broker.list",
    "partitioner",
    "partitioner_cb",
    "queuing.strategy",
    "request.required.acks",
    "retries",
    "sasl.password",
    "topic.blacklist",
    "transactional.id",
];

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Raw {
    postgres: RawPostgres,
    kafka: RawKafka,
    outbox: Vec<RawTable>,
    witness: RawWitness,
    worker: RawWorker,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawWitness {
    kind: WitnessKind,
    topic: Option<String>,
    file: Option<PathBuf>,
}

#[derive(Debug, Deserialize, Default, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum WitnessKind {
    #[default]
    Kafka,
    File,
    None,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawPostgres {
    url: Option<String>,
    password: Option<Secret>,
    password_file: Option<PathBuf>,
    tls_mode: Option<TlsMode>,
    tls_ca_file: Option<PathBuf>,
    tls_certificate_file: Option<PathBuf>,
    tls_key_file: Option<PathBuf>,
    slot: Option<String>,
    publication: Option<String>,
    failover: Option<bool>,
    connect_timeout_ms: Option<u64>,
    silence_timeout_ms: Option<u64>,
    receive_buffer_bytes: Option<usize>,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawKafka {
    brokers: Option<String>,
    sasl_password: Option<Secret>,
    sasl_password_file: Option<PathBuf>,
    properties: BTreeMap<String, toml::Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTable {
    table: String,
    #[serde(default)]
    preset: Preset,
    topic: Option<String>,
    id: Option<Names>,
    key: Option<Names>,
    payload: Option<Names>,
    headers: Option<Vec<RawHeader>>,
    #[serde(default)]
    timestamp: RawTimestamp,
}

#[derive(Debug, Deserialize, Default, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum Preset {
    #[default]
    Order,
    Debezium,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Names {
    One(String),
    Several(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHeader {
    name: String,
    column: Names,
}

#[derive(Debug, Deserialize, Default, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum RawTimestamp {
    #[default]
    Produce,
    Commit,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawWorker {
    instance: Option<String>,
    window_events: Option<usize>,
    window_bytes: Option<usize>,
    position_interval_ms: Option<u64>,
    idle_interval_ms: Option<u64>,
    shutdown_timeout_ms: Option<u64>,
    reconnect_max_ms: Option<u64>,
    exit_on_refusal: Option<bool>,
}

/// What the environment may set: `OUTBOX_TAILER_` + section + key in capitals.
const ENVIRONMENT: &[(&str, &str, EnvType)] = {
    use EnvType::{Literal, Text};
    &[
        ("postgres", "url", Text),
        ("postgres", "password", Text),
        ("postgres", "password_file", Text),
        ("postgres", "tls_mode", Text),
        ("postgres", "tls_ca_file", Text),
        ("postgres", "tls_certificate_file", Text),
        ("postgres", "tls_key_file", Text),
        ("postgres", "slot", Text),
        ("postgres", "publication", Text),
        ("postgres", "failover", Literal),
        ("postgres", "connect_timeout_ms", Literal),
        ("postgres", "silence_timeout_ms", Literal),
        ("postgres", "receive_buffer_bytes", Literal),
        ("kafka", "brokers", Text),
        ("kafka", "sasl_password", Text),
        ("kafka", "sasl_password_file", Text),
        ("kafka", "properties", Literal),
        ("", "outbox", Literal),
        ("witness", "kind", Text),
        ("witness", "topic", Text),
        ("witness", "file", Text),
        ("worker", "instance", Text),
        ("worker", "window_events", Literal),
        ("worker", "window_bytes", Literal),
        ("worker", "position_interval_ms", Literal),
        ("worker", "idle_interval_ms", Literal),
        ("worker", "shutdown_timeout_ms", Literal),
        ("worker", "reconnect_max_ms", Literal),
        ("worker", "exit_on_refusal", Literal),
    ]
};

/// How the text of an environment variable is read.
#[derive(Clone, Copy)]
enum EnvType {
    Text,
    /// A TOML value: a number, `true`, `{ "linger.ms" = 5 }`.
    Literal,
}

const SECTIONS: [&str; 5] = ["POSTGRES_", "KAFKA_", "WITNESS_", "WORKER_", "OUTBOX"];
const ENV_PREFIX: &str = "OUTBOX_TAILER_";

/// Values from the command line, which win over everything else.
#[derive(Debug, Default, Clone)]
pub struct Overrides {
    pub url: Option<String>,
    pub brokers: Option<String>,
    pub slot: Option<String>,
    pub publication: Option<String>,
    pub exit_on_refusal: bool,
}

/// The environment, without what is not text.
pub fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Reads the file (if any), lays environment and flags over it, and validates.
///
/// # Errors
/// A mistake that names the key, what it is, and what is allowed.
pub fn load(
    file: Option<&Path>,
    env: impl Iterator<Item = (String, String)>,
    flags: &Overrides,
) -> Result<Config> {
    let text = file
        .map(|path| {
            std::fs::read_to_string(path).map_err(|e| {
                Error::mistake(format!("cannot read the configuration {}", path.display())).because(e)
            })
        })
        .transpose()?;
    let place = file.map_or("the configuration".to_owned(), |path| path.display().to_string());
    parse(text.as_deref(), place, env, flags)
}

/// As [`load`]; `place` is what the file is called in messages.
///
/// # Errors
/// The same.
pub fn parse(
    file: Option<&str>,
    mut place: String,
    env: impl Iterator<Item = (String, String)>,
    flags: &Overrides,
) -> Result<Config> {
    let text = file.unwrap_or_default();
    let mut table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
        let before = text.bytes().take(e.span().map_or(0, |span| span.start));
        let line = 1 + before.filter(|b| *b == b'\n').count();
        Error::mistake(format!("{place}, line {line}: {}", e.message()))
    })?;
    for (name, value) in env {
        let Some(rest) = name.strip_prefix(ENV_PREFIX) else { continue };
        // Kubernetes names variables after a service, too.
        if !SECTIONS.iter().any(|section| rest.starts_with(section)) {
            continue;
        }
        overlay_env(&mut table, &name, rest, value)?;
        if file.is_none() {
            place = "the environment".to_owned();
        }
    }
    let sections = [
        ("postgres", "url", &flags.url),
        ("kafka", "brokers", &flags.brokers),
        ("postgres", "slot", &flags.slot),
        ("postgres", "publication", &flags.publication),
    ];
    for (section, key, value) in sections {
        if let Some(value) = value {
            set(&mut table, section, key, toml::Value::String(value.clone()));
        }
    }
    if flags.exit_on_refusal {
        set(&mut table, "worker", "exit_on_refusal", toml::Value::Boolean(true));
    }
    let raw = Raw::deserialize(table).map_err(|e: toml::de::Error| {
        // The last line of its text names the key.
        let text = e.to_string();
        let key = text.lines().find_map(|line| line.strip_prefix("in ")).unwrap_or_default();
        let key = if key.is_empty() { String::new() } else { format!(" in {key}") };
        Error::mistake(format!("{place}{key}: {}", nearest(e.message())))
    })?;
    validate(raw)
}

fn overlay_env(table: &mut toml::Table, name: &str, rest: &str, value: String) -> Result<()> {
    let env_name = |section: &str, key: &str| {
        [section, key]
            .iter()
            .filter(|s| !s.is_empty())
            .map(|s| s.to_uppercase())
            .collect::<Vec<_>>()
            .join("_")
    };
    let Some((section, key, kind)) =
        ENVIRONMENT.iter().find(|(section, key, _)| env_name(section, key) == rest)
    else {
        let known: Vec<String> =
            ENVIRONMENT.iter().map(|(s, k, _)| format!("{ENV_PREFIX}{}", env_name(s, k))).collect();
        return Err(Error::mistake(format!(
            "the environment: unknown variable {name}{}",
            did_you_mean(name, &known)
        )));
    };
    let value = match kind {
        EnvType::Text => toml::Value::String(value),
        EnvType::Literal => format!("value = {value}")
            .parse::<toml::Table>()
            .ok()
            .and_then(|mut t| t.remove("value"))
            .ok_or_else(|| {
                Error::mistake(format!(
                    "the environment: {name} is not a TOML value (a number, true, a list, a table)"
                ))
            })?,
    };
    set(table, section, key, value);
    Ok(())
}

fn set(table: &mut toml::Table, section: &str, key: &str, value: toml::Value) {
    let target = match section {
        "" => Some(table),
        _ => table.entry(section).or_insert_with(|| toml::Value::Table(toml::Table::new())).as_table_mut(),
    };
    // A section that is no table is refused when the whole is read.
    if let Some(target) = target {
        target.insert(key.to_owned(), value);
    }
}

/// Adds the nearest known name to serde's message about an unknown one.
fn nearest(message: &str) -> String {
    let line = message.trim().replace('\n', " ");
    let quoted: Vec<String> = line.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    match (line.starts_with("unknown "), quoted.split_first()) {
        (true, Some((unknown, known))) => {
            let kind = line.split('`').next().unwrap_or_default().trim();
            format!("{kind} `{unknown}`{}", did_you_mean(unknown, known))
        }
        _ => line,
    }
}

fn did_you_mean(unknown: &str, known: &[String]) -> String {
    let best = known.iter().max_by(|a, b| {
        let score = |name: &str| strsim::jaro_winkler(unknown, name);
        score(a).total_cmp(&score(b))
    });
    best.map_or(String::new(), |name| format!("; did you mean `{name}`? Known: {}", known.join(", ")))
}

fn validate(raw: Raw) -> Result<Config> {
    let worker = &raw.worker;
    let ms = |given: Option<u64>, default: u64| Duration::from_millis(given.unwrap_or(default));
    let config = Config {
        worker: Worker {
            instance: worker.instance.clone().unwrap_or_else(default_instance),
            window_events: at_least(worker.window_events.unwrap_or(10_000), 1, "worker.window_events")?
                .min(1_000_000),
            window_bytes: at_least(worker.window_bytes.unwrap_or(16 << 20), 1, "worker.window_bytes")?,
            position_interval: ms(worker.position_interval_ms, 100),
            idle_interval: ms(worker.idle_interval_ms, 10_000),
            shutdown_timeout: ms(worker.shutdown_timeout_ms, 10_000),
            reconnect_max: positive_ms(worker.reconnect_max_ms, 10_000, "worker.reconnect_max_ms")?,
            exit_on_refusal: worker.exit_on_refusal.unwrap_or(false),
        },
        postgres: postgres(raw.postgres)?,
        kafka: kafka(raw.kafka)?,
        witness: witness(raw.witness)?,
        tables: if raw.outbox.is_empty() {
            vec![table(RawTable::order("public.outbox_event"))?]
        } else {
            raw.outbox.into_iter().map(table).collect::<Result<_>>()?
        },
    };
    for (i, table) in config.tables.iter().enumerate() {
        if config.tables[..i].iter().any(|other| other.name() == table.name()) {
            return Err(Error::mistake(format!("outbox: table {} is configured twice", table.name())));
        }
    }
    Ok(config)
}

fn at_least(value: usize, least: usize, key: &str) -> Result<usize> {
    if value >= least {
        Ok(value)
    } else {
        Err(Error::mistake(format!("{key} = {value}: must be at least {least}")))
    }
}

fn positive_ms(given: Option<u64>, default: u64, key: &str) -> Result<Duration> {
    match given.unwrap_or(default) {
        0 => Err(Error::mistake(format!("{key} = 0: must be at least 1"))),
        ms => Ok(Duration::from_millis(ms)),
    }
}

fn topic_name(topic: &str, place: &str) -> Result<()> {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if topic.is_empty() || topic.len() > 249 || topic == "." || topic == ".." || !topic.chars().all(legal) {
        return Err(Error::mistake(format!(
            "{place} {topic:?} is not a Kafka topic name (1 to 249 characters out of a-z, A-Z, 0-9, '.', '_', '-')"
        )));
    }
    Ok(())
}

fn witness(raw: RawWitness) -> Result<Witness> {
    let unused =
        |key: &str, kind: &str| Error::mistake(format!("witness.{key} is for witness.kind = {kind:?}"));
    if raw.topic.is_some() && raw.kind != WitnessKind::Kafka {
        return Err(unused("topic", "kafka"));
    }
    if raw.file.is_some() && raw.kind != WitnessKind::File {
        return Err(unused("file", "file"));
    }
    Ok(match raw.kind {
        WitnessKind::None => Witness::None,
        WitnessKind::File => Witness::File(
            raw.file.ok_or_else(|| Error::mistake("witness.kind = \"file\" needs witness.file"))?,
        ),
        WitnessKind::Kafka => {
            let topic = raw.topic.unwrap_or_else(|| "outbox-tailer.witness".to_owned());
            topic_name(&topic, "witness.topic")?;
            Witness::Kafka { topic }
        }
    })
}

fn default_instance() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "worker".to_owned());
    format!("{}:{}", host.trim(), std::process::id())
}

fn postgres(raw: RawPostgres) -> Result<Postgres> {
    let url = raw.url.ok_or_else(|| {
        Error::mistake("postgres.url is missing: set it in the file, as OUTBOX_TAILER_POSTGRES_URL or with --database-url")
    })?;
    let (url, ssl) = split_ssl(&url)?;
    let ssl_mode = ssl.get("sslmode").map(|mode| tls_mode(mode)).transpose()?;
    // The parser's own message may quote the URL, password included.
    let parsed: tokio_postgres::Config = url.parse().map_err(|_| {
        Error::mistake("postgres.url is neither postgres://user:password@host:port/database nor key=value pairs (percent-encode special characters of a password in a URL)")
    })?;
    if parsed.get_hosts().is_empty() {
        return Err(Error::mistake("postgres.url names no host"));
    }
    let odd = |host: &tokio_postgres::config::Host| match host {
        tokio_postgres::config::Host::Tcp(name) => name.contains(['@', '/', ' ']),
        tokio_postgres::config::Host::Unix(_) => false,
    };
    if parsed.get_hosts().iter().any(odd) {
        // What looks like the host is the end of the password.
        return Err(Error::mistake(
            "postgres.url: the host is not a name; percent-encode @ : / in the password",
        ));
    }
    if parsed.get_user().is_none() {
        return Err(Error::mistake("postgres.url names no user"));
    }
    if !parsed.get_hostaddrs().is_empty() {
        return Err(Error::mistake("postgres.url: hostaddr is not supported, give the address as host"));
    }
    let slot = raw.slot.unwrap_or_else(|| "outbox_tailer".to_owned());
    let slot_ok = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if slot.is_empty() || slot.len() > 63 || !slot.chars().all(slot_ok) {
        return Err(Error::mistake(format!(
            "postgres.slot = {slot:?}: a slot name has 1 to 63 characters out of a-z, 0-9 and _"
        )));
    }
    let publication = raw.publication.unwrap_or_else(|| "outbox_tailer".to_owned());
    identifier(&publication, "postgres.publication")?;
    let file = |given: Option<PathBuf>, key: &str| given.or_else(|| ssl.get(key).map(PathBuf::from));
    let tls = Tls {
        mode: raw.tls_mode.or(ssl_mode),
        ca_file: file(raw.tls_ca_file, "sslrootcert"),
        certificate_file: file(raw.tls_certificate_file, "sslcert"),
        key_file: file(raw.tls_key_file, "sslkey"),
    };
    if tls.certificate_file.is_some() != tls.key_file.is_some() {
        return Err(Error::mistake(
            "postgres.tls_certificate_file and postgres.tls_key_file need each other",
        ));
    }
    Ok(Postgres {
        url: parsed,
        tls,
        password: raw.password,
        password_file: raw.password_file,
        slot,
        publication,
        failover: raw.failover,
        connect_timeout: positive_ms(raw.connect_timeout_ms, 10_000, "postgres.connect_timeout_ms")?,
        silence_timeout: positive_ms(raw.silence_timeout_ms, 30_000, "postgres.silence_timeout_ms")?,
        receive_buffer_bytes: raw.receive_buffer_bytes,
    })
}

fn tls_mode(text: &str) -> Result<TlsMode> {
    Ok(match text {
        "disable" => TlsMode::Disable,
        "prefer" => TlsMode::Prefer,
        "require" => TlsMode::Require,
        "verify-ca" => TlsMode::VerifyCa,
        "verify-full" => TlsMode::VerifyFull,
        other => {
            // Behind a value that is missing, or a quote, the next thing may be the password.
            let word = |c: char| c.is_ascii_alphabetic() || matches!(c, '-' | '_');
            let shown = if other.chars().all(word) { other } else { "..." };
            return Err(Error::mistake(format!(
                "postgres.url: sslmode={shown} is not one of disable, prefer, require, verify-ca, verify-full"
            )));
        }
    })
}

/// Takes libpq's `ssl...` parameters, which tokio-postgres knows only in part, out of a URL or of
/// key=value pairs.
fn split_ssl(url: &str) -> Result<(String, BTreeMap<String, String>)> {
    const OURS: [&str; 4] = ["sslmode", "sslrootcert", "sslcert", "sslkey"];
    let mut ssl = BTreeMap::new();
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        let Some((base, query)) = url.split_once('?') else { return Ok((url.to_owned(), ssl)) };
        let mut rest = Vec::new();
        for pair in query.split('&') {
            match pair.split_once('=') {
                Some((key, value)) if OURS.contains(&key) => {
                    ssl.insert(key.to_owned(), percent_decode(value)?);
                }
                _ => rest.push(pair),
            }
        }
        let query = if rest.is_empty() { String::new() } else { format!("?{}", rest.join("&")) };
        return Ok((format!("{base}{query}"), ssl));
    }
    // key=value, values quoted with ' and escaped with \ (PostgreSQL manual, "Connection Strings").
    let mut kept = String::new();
    let mut chars = url.chars().peekable();
    loop {
        while chars.next_if(|c| c.is_whitespace()).is_some() {}
        if chars.peek().is_none() {
            return Ok((kept, ssl));
        }
        let (mut pair, mut key, mut value) = (String::new(), String::new(), String::new());
        while let Some(c) = chars.next_if(|c| *c != '=') {
            pair.push(c);
            key.push(c);
        }
        pair.extend(chars.next());
        while let Some(c) = chars.next_if(|c| c.is_whitespace()) {
            pair.push(c);
        }
        let quoted = chars.peek() == Some(&'\'');
        if quoted {
            pair.extend(chars.next());
        }
        while let Some(c) = chars.next_if(|c| if quoted { *c != '\'' } else { !c.is_whitespace() }) {
            pair.push(c);
            let literal = if c == '\\' { chars.next() } else { Some(c) };
            if c == '\\' {
                pair.extend(literal);
            }
            value.extend(literal);
        }
        if quoted {
            pair.extend(chars.next());
        }
        if OURS.contains(&key.trim()) {
            ssl.insert(key.trim().to_owned(), value);
        } else {
            kept.push_str(&pair);
            kept.push(' ');
        }
    }
}

fn percent_decode(text: &str) -> Result<String> {
    let bad = || Error::mistake("postgres.url: a % in the parameters is not followed by two hex digits");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(b) = rest.next() {
        bytes.push(match b {
            b'%' => {
                let digits = [rest.next().ok_or_else(bad)?, rest.next().ok_or_else(bad)?];
                let digits = std::str::from_utf8(&digits).map_err(|_| bad())?;
                u8::from_str_radix(digits, 16).map_err(|_| bad())?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

fn identifier(name: &str, key: &str) -> Result<()> {
    // NAMEDATALEN - 1; the server would cut a longer one with a mere notice.
    if name.is_empty() || name.len() > 63 || name.contains('\0') {
        return Err(Error::mistake(format!("{key} = {name:?}: a name has 1 to 63 bytes")));
    }
    Ok(())
}

fn kafka(raw: RawKafka) -> Result<Kafka> {
    let brokers = raw.brokers.unwrap_or_default();
    if brokers.trim().is_empty() {
        return Err(Error::mistake(
            "kafka.brokers is missing: set it in the file, as OUTBOX_TAILER_KAFKA_BROKERS or with --brokers",
        ));
    }
    let mut properties = BTreeMap::new();
    for (name, value) in raw.properties {
        if FIXED_PROPERTIES.contains(&name.as_str()) {
            let instead = match name.as_str() {
                "bootstrap.servers" | "metadata.broker.list" => "; use kafka.brokers",
                "sasl.password" => {
                    "; use kafka.sasl_password or kafka.sasl_password_file, which are never printed"
                }
                _ => "",
            };
            return Err(Error::mistake(format!(
                "kafka.properties: {name} is fixed, the promise rests on it{instead}"
            )));
        }
        let text = match value {
            toml::Value::String(s) => s,
            toml::Value::Integer(_) | toml::Value::Boolean(_) | toml::Value::Float(_) => value.to_string(),
            _ => {
                return Err(Error::mistake(format!(
                    "kafka.properties: {name} must be a text, a number or true/false"
                )));
            }
        };
        let name =
            ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| (*name).to_owned());
        if properties.insert(name.clone(), text).is_some() {
            return Err(Error::mistake(format!("kafka.properties: {name} is given twice, under two names")));
        }
    }
    if let Some(value) = properties.get("max.in.flight.requests.per.connection")
        && !value.parse::<u32>().is_ok_and(|n| (1..=5).contains(&n))
    {
        return Err(Error::mistake(format!(
            "kafka.properties: max.in.flight.requests.per.connection = {value}: idempotence keeps the order for 1 to 5 requests in flight"
        )));
    }
    Ok(Kafka {
        brokers,
        properties,
        knows_limits: true,
        sasl_password: raw.sasl_password,
        sasl_password_file: raw.sasl_password_file,
    })
}

impl RawTable {
    fn order(table: &str) -> Self {
        RawTable {
            table: table.to_owned(),
            preset: Preset::Order,
            topic: None,
            id: None,
            key: None,
            payload: None,
            headers: None,
            timestamp: RawTimestamp::Produce,
        }
    }
}

fn table(raw: RawTable) -> Result<TableConfig> {
    let (schema, name) = split_name(&raw.table)?;
    let place = format!("outbox table {}", raw.table);
    let (id, key, headers): (_, _, &[(&str, &str)]) = match raw.preset {
        Preset::Order => ("event_id", "order_id", &[("eventType", "event_type"), ("revision", "revision")]),
        Preset::Debezium => ("id", "aggregateid", &[("eventType", "type")]),
    };
    let topic = match (raw.topic, raw.preset) {
        (Some(topic), _) => topic,
        (None, Preset::Order) => "outbox.event.order".to_owned(),
        (None, Preset::Debezium) => return Err(Error::mistake(format!("{place}: topic is missing"))),
    };
    topic_name(&topic, &format!("{place}: topic"))?;
    let column = |given: Option<Names>, default: &str, key: &str| match given {
        Some(names) => column_name(names, &format!("{place}: {key}")),
        None => Ok(ColumnName::new(default)),
    };
    let headers = match raw.headers {
        None => headers.iter().map(|(name, column)| ((*name).to_owned(), ColumnName::new(column))).collect(),
        Some(given) => {
            let mut headers = Vec::new();
            for header in given {
                let taken = headers.iter().any(|(name, _): &(String, _)| *name == header.name);
                if header.name == ID_HEADER || taken || header.name.is_empty() || header.name.contains('\0') {
                    return Err(Error::mistake(format!(
                        "{place}: header {:?} is taken or not a name",
                        header.name
                    )));
                }
                let column = column_name(header.column, &format!("{place}: header {}", header.name))?;
                headers.push((header.name, column));
            }
            headers
        }
    };
    Ok(TableConfig {
        schema,
        table: name,
        topic,
        id: column(raw.id, id, "id")?,
        key: column(raw.key, key, "key")?,
        payload: column(raw.payload, "payload", "payload")?,
        headers,
        timestamp: match raw.timestamp {
            RawTimestamp::Produce => Timestamp::Produce,
            RawTimestamp::Commit => Timestamp::Commit,
        },
    })
}

fn column_name(names: Names, place: &str) -> Result<ColumnName> {
    let names = match names {
        Names::One(name) => vec![name],
        Names::Several(names) => names,
    };
    if names.is_empty() {
        return Err(Error::mistake(format!("{place}: no column is named")));
    }
    names.iter().try_for_each(|name| identifier(name, place))?;
    Ok(ColumnName(names))
}

/// `schema.table`, either part in double quotes where it holds a dot or a quote; case is kept.
fn split_name(text: &str) -> Result<(String, String)> {
    let bad = || {
        Error::mistake(format!(
            "outbox table {text:?}: write schema.table, with \"...\" around a part that holds a dot"
        ))
    };
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    let mut quoted = false;
    while let Some(c) = chars.next() {
        let part = parts.last_mut().expect("never empty");
        match c {
            '"' if quoted && chars.next_if_eq(&'"').is_some() => part.push('"'),
            '"' if quoted || part.is_empty() => quoted = !quoted,
            '.' if !quoted => parts.push(String::new()),
            other => part.push(other),
        }
    }
    let (schema, table) = match <[String; 2]>::try_from(parts) {
        Ok([schema, table]) if !quoted => (schema, table),
        Err(parts) if parts.len() == 1 && !quoted => ("public".to_owned(), parts[0].clone()),
        _ => return Err(bad()),
    };
    identifier(&schema, "outbox table")?;
    identifier(&table, "outbox table")?;
    Ok((schema, table))
}

fn read_secret(value: Option<&Secret>, file: Option<&Path>, key: &str) -> Result<Option<Secret>> {
    match file {
        None => Ok(value.cloned()),
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|e| Error::mistake(format!("{key}: cannot read {}", path.display())).because(e))?;
            // Editors and secret stores end a file with a line break.
            Ok(Some(Secret(
                text.strip_suffix('\n')
                    .map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t))
                    .to_owned(),
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(file: &str, env: &[(&str, &str)]) -> Result<Config> {
        let dir = std::env::temp_dir().join(format!(
            "outbox-tailer-config-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("c.toml");
        std::fs::write(&path, file).unwrap();
        let env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        load(Some(&path), env, &Overrides::default())
    }

    const BASE: &str = "[postgres]\nurl = 'postgres://u:p@localhost/db'\n[kafka]\nbrokers = 'b:9092'\n";

    fn refused(file: &str, env: &[(&str, &str)]) -> String {
        with(file, env).expect_err("should be refused").line()
    }

    #[test]
    fn the_default_table_is_the_order_outbox() {
        let config = with(BASE, &[]).unwrap();
        assert_eq!(config.tables[0].name(), "public.outbox_event");
        assert_eq!(config.tables[0].topic, "outbox.event.order");
        let headers: Vec<_> = config.tables[0].headers.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(headers, ["eventType", "revision"]);
    }

    #[test]
    fn the_environment_wins_over_the_file_and_is_taken_literally() {
        let env = [
            ("OUTBOX_TAILER_KAFKA_BROKERS", "other:1"),
            ("OUTBOX_TAILER_POSTGRES_PASSWORD", "a$HOME$b"),
            ("PGHOST", "10.9.9.9"),
        ];
        let config = with(BASE, &env).unwrap();
        assert_eq!(config.kafka.brokers, "other:1");
        assert_eq!(config.postgres.password().unwrap().unwrap(), b"a$HOME$b");
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_nearest_name() {
        let file = BASE.replace("url =", "publicaton = 'x'\nurl =");
        assert!(refused(&file, &[]).contains("did you mean `publication`?"), "{}", refused(&file, &[]));
        let text = refused(BASE, &[("OUTBOX_TAILER_POSTGRES_SLOTT", "x")]);
        assert!(text.contains("did you mean `OUTBOX_TAILER_POSTGRES_SLOT`?"), "{text}");
    }

    #[test]
    fn slot_names_that_the_server_would_refuse_or_cut_are_refused_here() {
        for slot in ["MySlot", "orders-cdc", "", &"a".repeat(64)] {
            let text = refused(BASE, &[("OUTBOX_TAILER_POSTGRES_SLOT", slot)]);
            assert!(text.contains("1 to 63 characters"), "{text}");
        }
        assert!(with(BASE, &[("OUTBOX_TAILER_POSTGRES_SLOT", "1234")]).is_ok());
    }

    #[test]
    fn a_malformed_url_is_refused_without_its_password() {
        for url in [
            "postgres://u:S3cr3t%zz@h:port/db",
            "host=h user=u sslmode= password=S3cr3t",
            "host=h user=u sslmode='require\tpassword=S3cr3t",
        ] {
            let text = refused(BASE, &[("OUTBOX_TAILER_POSTGRES_URL", url)]);
            assert!(!text.contains("S3cr3t"), "{text}");
        }
        assert!(
            !format!("{:?}", with(BASE, &[("OUTBOX_TAILER_POSTGRES_PASSWORD", "S3cr3t")]).unwrap())
                .contains("S3cr3t")
        );
    }

    #[test]
    fn libpq_tls_parameters_are_understood_in_both_forms() {
        for url in [
            "postgres://u@h/db?application_name=x&sslmode=verify-full&sslrootcert=%2Fca%20x.pem",
            "host=h user=u  dbname=db sslmode = verify-full sslrootcert='/ca x.pem' password='it\\'s'",
        ] {
            let config = with(BASE, &[("OUTBOX_TAILER_POSTGRES_URL", url)]).unwrap();
            assert_eq!(config.postgres.tls.mode, Some(TlsMode::VerifyFull), "{url}");
            assert_eq!(config.postgres.tls.ca_file.as_deref(), Some(Path::new("/ca x.pem")), "{url}");
            assert_eq!(config.postgres.url.get_dbname(), Some("db"));
        }
        let text = refused(BASE, &[("OUTBOX_TAILER_POSTGRES_URL", "postgres://u@h/db?sslmode=verify_full")]);
        assert!(text.contains("verify_full is not one of"), "{text}");
    }

    #[test]
    fn passwords_with_special_characters_survive_every_form() {
        let password = "p@s:s/w#o%r$d{ü}'\"\\ x";
        let file = std::env::temp_dir().join(format!("outbox-tailer-secret-{}", std::process::id()));
        std::fs::write(&file, format!("{password}\n")).unwrap();
        let encoded: String = password.bytes().map(|b| format!("%{b:02X}")).collect();
        let quoted = password.replace('\\', "\\\\").replace('\'', "\\'");
        for env in [
            vec![("OUTBOX_TAILER_POSTGRES_URL", format!("postgres://u:{encoded}@h/db"))],
            vec![("OUTBOX_TAILER_POSTGRES_PASSWORD_FILE", file.display().to_string())],
            vec![("OUTBOX_TAILER_POSTGRES_URL", format!("host=h user=u dbname=db password='{quoted}'"))],
        ] {
            let env: Vec<(&str, &str)> = env.iter().map(|(k, v)| (*k, v.as_str())).collect();
            let config = with(BASE, &env).unwrap();
            assert_eq!(
                String::from_utf8(config.postgres.password().unwrap().unwrap()).unwrap(),
                password,
                "{env:?}"
            );
        }
    }

    #[test]
    fn properties_that_the_promise_rests_on_cannot_be_set() {
        let file = format!("{BASE}[kafka.properties]\n\"enable.idempotence\" = false\n");
        assert!(refused(&file, &[]).contains("enable.idempotence is fixed"));
        let file = format!("{BASE}[kafka.properties]\n\"max.in.flight\" = 6\n");
        assert!(refused(&file, &[]).contains("1 to 5"));
        let file = format!("{BASE}[kafka.properties]\n\"linger.ms\" = 5\n");
        assert_eq!(with(&file, &[]).unwrap().kafka.properties["linger.ms"], "5");
    }

    #[test]
    fn table_names_may_be_quoted() {
        assert_eq!(split_name("outbox").unwrap(), ("public".into(), "outbox".into()));
        assert_eq!(split_name("a.\"b.c\"\"d\"").unwrap(), ("a".into(), "b.c\"d".into()));
        assert_eq!(split_name("out\\box").unwrap(), ("public".into(), "out\\box".into()));
        assert!(split_name("a.b.c").is_err());
        assert!(split_name("a.\"b").is_err());
    }

    #[test]
    fn illegal_topics_and_reserved_headers_are_refused() {
        let file = format!("{BASE}[[outbox]]\ntable = 'o'\ntopic = 'bad topic'\n");
        assert!(refused(&file, &[]).contains("is not a Kafka topic name"));
        let file = format!("{BASE}[[outbox]]\ntable = 'o'\nheaders = [{{ name = 'id', column = 'x' }}]\n");
        assert!(refused(&file, &[]).contains("is taken"));
    }
}
