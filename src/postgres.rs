//! SQL sessions: which host, which settings, and what a server's error means for the operator.

use std::time::Duration;

use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::config::{Postgres, TlsMode};
use crate::error::{Error, Kind, Result};
use crate::tls;

/// Settings of every session that reads event rows, so that the text PostgreSQL makes does not
/// depend on the settings of a role, a database or the server.
pub const PINNED_OPTIONS: &str = "-c DateStyle=ISO,MDY -c TimeZone=UTC -c IntervalStyle=postgres \
     -c extra_float_digits=1 -c bytea_output=hex -c standard_conforming_strings=on -c client_min_messages=warning";

/// For SQL sessions: the position must move while `default_transaction_read_only` is on (some
/// services turn it on when the disk fills), and must not wait for a standby that is ourselves.
const SQL_OPTIONS: &str = "-c default_transaction_read_only=off -c synchronous_commit=local -c statement_timeout=30s \
     -c lock_timeout=20s -c idle_in_transaction_session_timeout=60s -c idle_session_timeout=0 -c search_path=pg_catalog";

/// As above: the server answers every statement within this.
pub const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);

pub const APPLICATION_NAME: &str = "outbox-tailer";

/// One of the configured hosts.
#[derive(Debug, Clone)]
pub struct Endpoint {
    pub host: Host,
    pub port: u16,
}

impl Endpoint {
    pub fn is_local(&self) -> bool {
        match &self.host {
            Host::Unix(_) => true,
            Host::Tcp(name) => {
                name == "localhost"
                    || name
                        .trim_matches(['[', ']'])
                        .parse()
                        .is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
            }
        }
    }

    /// Off this machine, TLS is verified unless the operator says otherwise.
    pub fn tls_mode(&self, settings: &Postgres) -> TlsMode {
        match settings.tls.mode {
            _ if matches!(self.host, Host::Unix(_)) => TlsMode::Disable,
            Some(mode) => mode,
            None if settings.tls.ca_file.is_some() => TlsMode::VerifyFull,
            None if self.is_local() => TlsMode::Prefer,
            None => TlsMode::VerifyFull,
        }
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.host {
            Host::Unix(path) => write!(f, "{}:{}", path.display(), self.port),
            Host::Tcp(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// A SQL session on the primary. When the server ends it, `closed` resolves: at a fast shutdown
/// that comes before the walsender waits for us.
pub struct Sql {
    pub client: Client,
    pub endpoint: Endpoint,
    /// `server_version_num`.
    pub version: i32,
    driver: tokio::task::JoinHandle<Result<(), tokio_postgres::Error>>,
}

impl Sql {
    /// Resolves when the session has ended; cancel-safe.
    pub async fn closed(&mut self) -> Error {
        match (&mut self.driver).await {
            Ok(Err(e)) => sql_error("the SQL session ended", e),
            _ => Error::wait("the server ended the SQL session"),
        }
    }
}

impl Drop for Sql {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Connects to the first host of the list that is not in recovery.
///
/// # Errors
/// A mistake where any host says so (wrong password, no such database), else a wait that names
/// what each host said.
pub async fn connect(settings: &Postgres) -> Result<Sql> {
    let mut said = Vec::new();
    for endpoint in endpoints(settings) {
        match connect_to(settings, &endpoint).await {
            Ok((sql, false)) => return Ok(sql),
            Ok((_, true)) => said.push((Kind::Wait, format!("{endpoint} is in recovery (a standby)"))),
            Err(e) => said.push((e.kind, e.line())),
        }
    }
    let kind = if said.iter().any(|(kind, _)| *kind == Kind::Mistake) { Kind::Mistake } else { Kind::Wait };
    let lines: Vec<String> = said.into_iter().map(|(_, line)| line).collect();
    Err(Error::new(kind, lines.join("; ")))
}

fn endpoints(settings: &Postgres) -> Vec<Endpoint> {
    let ports = settings.url.get_ports();
    let hosts = settings.url.get_hosts().iter().enumerate();
    hosts
        .map(|(i, host)| Endpoint {
            // tokio-postgres keeps the brackets of an IPv6 address.
            host: match host {
                Host::Tcp(name) => Host::Tcp(name.trim_matches(['[', ']']).to_owned()),
                Host::Unix(path) => Host::Unix(path.clone()),
            },
            port: ports.get(i).or(ports.first()).copied().unwrap_or(5432),
        })
        .collect()
}

async fn connect_to(settings: &Postgres, endpoint: &Endpoint) -> Result<(Sql, bool)> {
    let given = &settings.url;
    let mut config = tokio_postgres::Config::new();
    match &endpoint.host {
        Host::Tcp(name) => config.host(name),
        Host::Unix(path) => config.host_path(path),
    };
    config
        .port(endpoint.port)
        .user(given.get_user().unwrap_or_default())
        .dbname(given.get_dbname().or(given.get_user()).unwrap_or_default())
        .application_name(APPLICATION_NAME)
        .channel_binding(given.get_channel_binding())
        .options(format!("{} {PINNED_OPTIONS} {SQL_OPTIONS}", given.get_options().unwrap_or_default()))
        .connect_timeout(settings.connect_timeout)
        .keepalives_idle(Duration::from_secs(10))
        .keepalives_interval(Duration::from_secs(5))
        .keepalives_retries(3)
        .tcp_user_timeout(settings.silence_timeout);
    if let Some(password) = settings.password()? {
        config.password(password);
    }
    let mode = endpoint.tls_mode(settings);
    config.ssl_mode(match mode {
        TlsMode::Disable => SslMode::Disable,
        TlsMode::Prefer => SslMode::Prefer,
        TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => SslMode::Require,
    });
    let failed = |e| sql_error(&format!("cannot connect to PostgreSQL at {endpoint}"), e);
    let connecting = async {
        if mode == TlsMode::Disable {
            let (client, connection) = config.connect(NoTls).await.map_err(failed)?;
            Ok((client, tokio::spawn(connection)))
        } else {
            let tls = MakeRustlsConnect::new(tls::client_config(&settings.tls, mode)?);
            let (client, connection) = config.connect(tls).await.map_err(failed)?;
            Ok((client, tokio::spawn(connection)))
        }
    };
    let timed_out = |_| Error::wait(format!("cannot connect to PostgreSQL at {endpoint}: no answer in time"));
    // connect_timeout covers the TCP handshake only.
    let (client, driver) =
        tokio::time::timeout(settings.connect_timeout, connecting).await.map_err(timed_out)??;
    let mut sql = Sql { client, endpoint: endpoint.clone(), version: 0, driver };
    let facts = "SELECT current_setting('server_version_num')::int, pg_is_in_recovery()";
    let row = tokio::time::timeout(settings.connect_timeout, sql.client.query_one(facts, &[]))
        .await
        .map_err(timed_out)?
        .map_err(failed)?;
    sql.version = row.get(0);
    if sql.version < 140_000 {
        return Err(Error::mistake(format!(
            "PostgreSQL at {endpoint} is version {}, 14 or newer is needed",
            sql.version
        )));
    }
    Ok((sql, row.get(1)))
}

/// Turns a tokio-postgres error into ours, by its SQLSTATE.
pub fn sql_error(what: &str, e: tokio_postgres::Error) -> Error {
    let kind = match e.code() {
        Some(code) => sqlstate_kind(code.code()),
        // The TLS handshake, or an authentication method that this client refuses.
        None if tls_refused(&e) => Kind::Mistake,
        None => Kind::Wait,
    };
    let hint = match e.code().map(SqlState::code) {
        Some("42501") => " (see \"Roles\" in the README for the GRANT)",
        Some("42P01" | "3F000") => " (has `outbox-tailer init` been run in this database?)",
        _ => "",
    };
    let detail = e.as_db_error().map(|db| {
        let detail = db.detail().map_or(String::new(), |d| format!(" ({d})"));
        format!("{}{detail} (SQLSTATE {})", db.message(), db.code().code())
    });
    match detail {
        Some(detail) => Error::new(kind, format!("{what}: {detail}{hint}")),
        None => Error::new(kind, what).because(e),
    }
}

/// What follows from a SQLSTATE (PostgreSQL manual, appendix A).
pub fn sqlstate_kind(code: &str) -> Kind {
    match code {
        // invalid_authorization, invalid_password, invalid_catalog_name, insufficient_privilege,
        // undefined_table, undefined_column, undefined_function, invalid_schema_name,
        // undefined_object, syntax_error
        "28000" | "28P01" | "3D000" | "42501" | "42P01" | "42703" | "42883" | "3F000" | "42704" | "42601" => {
            Kind::Mistake
        }
        _ => Kind::Wait,
    }
}

fn tls_refused(e: &tokio_postgres::Error) -> bool {
    let mut source = std::error::Error::source(e);
    while let Some(cause) = source {
        if let Some(io) = cause.downcast_ref::<std::io::Error>()
            && io.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
        {
            return true;
        }
        source = cause.source();
    }
    let text = e.to_string();
    ["does not support TLS", "authentication error", "invalid configuration"].iter().any(|t| text.contains(t))
}
