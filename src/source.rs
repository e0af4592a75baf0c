//! The replication session: connect, authenticate, ask, stream.
//!
//! One task owns the socket, reads and writes. The session stands on the protocol layer of
//! `pgwire-replication` and on `postgres-protocol`, not on a client library: NOTICEs and SQLSTATEs
//! must be seen (PostgreSQL 18 announces skipped rows in a WARNING only), the socket needs
//! time-outs, and every status update says explicitly what is written, flushed and applied.

pub mod socket;

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use pgwire_replication::protocol::messages::{ErrorFields, auth, parse_auth_request};
use pgwire_replication::protocol::replication::{ReplicationCopyData, parse_copy_data, unix_to_pg_timestamp};
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{
    ChannelBinding, SCRAM_SHA_256, SCRAM_SHA_256_PLUS, ScramSha256,
};
use postgres_protocol::message::frontend;
use tokio::time::{Instant, timeout, timeout_at};

use crate::config::Postgres;
use crate::error::{Error, Kind, Refusal, Result};
use crate::postgres::{APPLICATION_NAME, Endpoint, PINNED_OPTIONS, sqlstate_kind};
use crate::relay::Lsn;
use crate::startcheck::System;
use socket::{Reads, Socket};

/// No message of the server may be longer: PostgreSQL's own limit for one value is 1 GiB.
const MAX_MESSAGE_BYTES: usize = 1 << 30;
/// A buffer grown by a large row is given back when it is empty and larger than this.
const KEEP_BUFFER_BYTES: usize = 1 << 20;
/// A reader that is behind passes so much on at a time, or what has come in this time: the producer's
/// batches are larger, and there are fewer changes from one thread to the other.
const GATHER_BYTES: usize = 256 << 10;
const GATHER_TIME: Duration = Duration::from_millis(10);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A walsender session that is not streaming yet.
pub struct Session {
    socket: Socket,
    buffer: BytesMut,
    endpoint: Endpoint,
    connect_timeout: Duration,
    /// Process id of the walsender.
    pub backend_pid: i32,
}

/// A walsender session that streams.
pub struct Stream {
    socket: Socket,
    buffer: BytesMut,
    /// The buffer is still being filled, until then.
    gathering: Option<Instant>,
}

/// What came from the server while streaming.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// One pgoutput message, and where it is in the WAL (0 where it is nowhere).
    Wal {
        lsn: Lsn,
        data: Bytes,
    },
    Keepalive {
        wal_end: Lsn,
        reply_requested: bool,
    },
    /// A NOTICE or WARNING.
    Notice {
        /// PostgreSQL 18: the publication was missing when rows were decoded.
        rows_skipped: bool,
        text: String,
    },
}

type Row = Vec<Option<String>>;

impl Session {
    /// Opens a walsender session in the database of the URL, on the host that the SQL session
    /// found to be the primary.
    ///
    /// # Errors
    /// By SQLSTATE a mistake or a wait.
    pub async fn connect(settings: &Postgres, endpoint: &Endpoint) -> Result<Self> {
        let limit = settings.connect_timeout;
        let opening = async {
            let socket = Socket::open(settings, endpoint).await?;
            let mut session = Session {
                socket,
                buffer: BytesMut::new(),
                endpoint: endpoint.clone(),
                connect_timeout: limit,
                backend_pid: 0,
            };
            session.start_up(settings).await?;
            Ok(session)
        };
        timeout(limit, opening).await.map_err(|_| {
            Error::wait(format!(
                "cannot open a replication connection to {endpoint}: no answer in {} s",
                limit.as_secs()
            ))
        })?
    }

    async fn start_up(&mut self, settings: &Postgres) -> Result<()> {
        let url = &settings.url;
        let user = url.get_user().unwrap_or_default();
        let options = format!("{} {PINNED_OPTIONS}", url.get_options().unwrap_or_default());
        let parameters = [
            ("user", user),
            ("database", url.get_dbname().unwrap_or(user)),
            ("replication", "database"),
            ("client_encoding", "UTF8"),
            ("application_name", APPLICATION_NAME),
            ("options", options.as_str()),
        ];
        self.write(|out| frontend::startup_message(parameters, out)).await?;
        let password = settings.password()?;
        let mut scram = None;
        loop {
            let (tag, body) = self.message().await?;
            match tag {
                b'R' => self.authenticate(settings, &body, user, password.as_deref(), &mut scram).await?,
                b'E' => return Err(self.refused("refuses the replication connection", &body)),
                b'K' => self.backend_pid = (&body[..]).try_get_i32().unwrap_or_default(),
                b'Z' => return Ok(()),
                _ => {} // parameters, notices
            }
        }
    }

    async fn authenticate(
        &mut self,
        settings: &Postgres,
        body: &[u8],
        user: &str,
        password: Option<&[u8]>,
        scram: &mut Option<ScramSha256>,
    ) -> Result<()> {
        let (kind, data) = parse_auth_request(body).map_err(|e| self.broken(&e.to_string()))?;
        let endpoint = self.endpoint.to_string();
        let needed =
            || Error::mistake(format!("PostgreSQL at {endpoint} asks for a password and none is configured"));
        let broken = |e| Error::wait(format!("authentication at {endpoint} failed")).because(e);
        let authentication = |e| Error::mistake(format!("authentication at {endpoint} failed")).because(e);
        match kind {
            auth::OK => Ok(()),
            auth::CLEARTEXT_PASSWORD => {
                let password = password.ok_or_else(needed)?;
                self.write(|out| frontend::password_message(password, out)).await
            }
            auth::MD5_PASSWORD => {
                let salt: [u8; 4] =
                    data.try_into().map_err(|_| self.broken("a salt of four bytes was expected"))?;
                let hash = md5_hash(user.as_bytes(), password.ok_or_else(needed)?, salt);
                self.write(|out| frontend::password_message(hash.as_bytes(), out)).await
            }
            auth::SASL => {
                let bound =
                    settings.url.get_channel_binding() == tokio_postgres::config::ChannelBinding::Require;
                let offered: Vec<&[u8]> = data.split(|b| *b == 0).collect();
                let offers = |name: &str| offered.contains(&name.as_bytes());
                let (mechanism, binding) = match self.socket.channel_binding() {
                    Some(digest) if offers(SCRAM_SHA_256_PLUS) => {
                        (SCRAM_SHA_256_PLUS, ChannelBinding::tls_server_end_point(digest))
                    }
                    Some(_) => (SCRAM_SHA_256, ChannelBinding::unrequested()),
                    None => (SCRAM_SHA_256, ChannelBinding::unsupported()),
                };
                if bound && mechanism != SCRAM_SHA_256_PLUS {
                    return Err(Error::mistake(format!(
                        "channel_binding=require, and PostgreSQL at {endpoint} does not offer it"
                    )));
                }
                if !offers(mechanism) {
                    return Err(Error::mistake(format!("PostgreSQL at {endpoint} offers no SCRAM-SHA-256")));
                }
                let state = scram.insert(ScramSha256::new(password.ok_or_else(needed)?, binding));
                let first = state.message().to_vec();
                self.write(|out| frontend::sasl_initial_response(mechanism, &first, out)).await
            }
            auth::SASL_CONTINUE => {
                let state = scram.as_mut().ok_or_else(|| self.broken("SASL out of turn"))?;
                state.update(data).map_err(authentication)?;
                let next = state.message().to_vec();
                self.write(|out| frontend::sasl_response(&next, out)).await
            }
            // Proves that the server knows the password, too.
            auth::SASL_FINAL => {
                let state = scram.as_mut().ok_or_else(|| self.broken("SASL out of turn"))?;
                state.finish(data).map_err(broken)
            }
            other => Err(Error::mistake(format!(
                "PostgreSQL at {endpoint} wants authentication method {other}, which is not supported"
            ))),
        }
    }

    /// Runs one replication command or simple query and gives its rows.
    ///
    /// # Errors
    /// By SQLSTATE; `what` says for whom.
    pub async fn query(&mut self, what: &str, command: &str) -> Result<Vec<Row>> {
        self.write(|out| frontend::query(command, out)).await?;
        let mut rows = Vec::new();
        let mut error = None;
        loop {
            let (tag, body) = match self.message().await {
                Ok(message) => message,
                Err(lost) => return Err(error.unwrap_or(lost)), // a FATAL is the last message
            };
            match tag {
                b'D' => rows.push(data_row(&body).ok_or_else(|| self.broken("a malformed row"))?),
                b'E' => error = Some(self.refused(what, &body)),
                b'Z' => return error.map_or(Ok(rows), Err),
                _ => {}
            }
        }
    }

    /// # Errors
    /// When the server does not answer as the manual says ("Streaming Replication Protocol").
    pub async fn identify_system(&mut self) -> Result<System> {
        let rows = self.bounded("IDENTIFY_SYSTEM", "IDENTIFY_SYSTEM").await?;
        let field = |i: usize| rows.first().and_then(|row| row.get(i)).cloned().flatten();
        let system = || {
            Some(System {
                identifier: field(0)?,
                timeline: field(1)?.parse().ok()?,
                wal_end: field(2)?.parse().ok()?,
            })
        };
        system().ok_or_else(|| self.broken("an unexpected answer to IDENTIFY_SYSTEM"))
    }

    /// The history file of a timeline: (timeline, LSN at which it was left), oldest first.
    ///
    /// # Errors
    /// When the server does not have the file.
    pub async fn timeline_history(&mut self, timeline: u32) -> Result<Vec<(u32, Lsn)>> {
        if timeline == 1 {
            return Ok(Vec::new()); // the first has no history file
        }
        let rows = self.bounded("TIMELINE_HISTORY", &format!("TIMELINE_HISTORY {timeline}")).await?;
        let content = rows.into_iter().next().and_then(|mut row| row.pop().flatten()).unwrap_or_default();
        let line = |line: &str| {
            let mut fields = line.split_whitespace();
            Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
        };
        Ok(content.lines().filter_map(line).collect())
    }

    /// `wal_sender_timeout` of this session; `None` when it is off.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn wal_sender_timeout(&mut self) -> Result<Option<Duration>> {
        let sql = "SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'"; // milliseconds
        let rows = self.bounded("reading wal_sender_timeout", sql).await?;
        let ms = rows.first().and_then(|row| row.first()?.as_ref()?.parse().ok()).unwrap_or(60_000);
        Ok((ms > 0).then(|| Duration::from_millis(ms)))
    }

    async fn bounded(&mut self, what: &str, command: &str) -> Result<Vec<Row>> {
        let limit = self.connect_timeout;
        timeout(limit, self.query(what, command))
            .await
            .map_err(|_| Error::wait(format!("{what}: PostgreSQL does not answer")))?
    }

    /// `START_REPLICATION` of a pgoutput slot, text format, protocol version 1: only committed
    /// transactions come, one after the other.
    ///
    /// # Errors
    /// By SQLSTATE; 55006 (another worker streams) is a wait.
    pub async fn start(mut self, slot: &str, publication: &str, from: Lsn) -> Result<Stream> {
        let publication = postgres_protocol::escape::escape_identifier(publication);
        let command = format!(
            "START_REPLICATION SLOT {} LOGICAL {from} (proto_version '1', publication_names {})",
            postgres_protocol::escape::escape_identifier(slot),
            postgres_protocol::escape::escape_literal(&publication),
        );
        let limit = self.connect_timeout;
        let starting = async {
            self.write(|out| frontend::query(&command, out)).await?;
            loop {
                let (tag, body) = self.message().await?;
                match tag {
                    b'W' => return Ok(()),
                    b'E' => return Err(self.refused(&format!("does not start slot {slot}"), &body)),
                    _ => {}
                }
            }
        };
        timeout(limit, starting)
            .await
            .map_err(|_| Error::wait(format!("slot {slot} does not start: no answer")))??;
        Ok(Stream { socket: self.socket, buffer: self.buffer, gathering: None })
    }

    async fn write(&mut self, message: impl FnOnce(&mut BytesMut) -> std::io::Result<()>) -> Result<()> {
        let mut out = BytesMut::new();
        message(&mut out)
            .map_err(|e| Error::mistake("a name or password cannot be sent to PostgreSQL").because(e))?;
        self.socket.write_all(&out).await.map_err(|e| lost(&self.endpoint, e))
    }

    async fn message(&mut self) -> Result<(u8, Bytes)> {
        loop {
            if let Some(message) = take_message(&mut self.buffer)? {
                return Ok(message);
            }
            self.socket.fill(&mut self.buffer).await.map_err(|e| lost(&self.endpoint, e))?;
        }
    }

    /// An ErrorResponse as an error of ours.
    fn refused(&self, what: &str, body: &[u8]) -> Error {
        server_error(&format!("PostgreSQL at {} {what}", self.endpoint), body)
    }

    fn broken(&self, what: &str) -> Error {
        Error::wait(format!("PostgreSQL at {} broke the protocol: {what}", self.endpoint))
    }
}

impl Stream {
    /// Waits for bytes and appends them to the buffer; cancel-safe, because partial messages stay
    /// in the buffer. `behind`: there is more WAL to come than can be of use at once (see [`socket`]).
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn fill(&mut self, behind: bool) -> Result<()> {
        if self.buffer.is_empty() && self.buffer.capacity() > KEEP_BUFFER_BYTES {
            self.buffer = BytesMut::new();
        }
        let filled = if behind { self.gather().await } else { self.read().await };
        self.gathering = None;
        filled.map_err(|e| Error::wait("the replication connection is gone").because(e))
    }

    async fn read(&mut self) -> std::io::Result<()> {
        match self.gathering {
            Some(_) => Ok(()), // there is something to take
            None => self.socket.fill(&mut self.buffer).await,
        }
    }

    async fn gather(&mut self) -> std::io::Result<()> {
        if self.gathering.is_none() {
            self.socket.fill_behind(&mut self.buffer).await?;
        }
        let until = *self.gathering.get_or_insert_with(|| Instant::now() + GATHER_TIME);
        while self.buffer.len() < GATHER_BYTES {
            match timeout_at(until, self.socket.fill_behind(&mut self.buffer)).await {
                Ok(filled) => filled?,
                Err(_) => break,
            }
        }
        Ok(())
    }

    pub fn reads(&self) -> Reads {
        self.socket.reads
    }

    /// Takes the next complete message out of the buffer, without waiting.
    ///
    /// # Errors
    /// When the server ends the stream or breaks the protocol.
    pub fn take(&mut self) -> Result<Option<Received>> {
        if self.gathering.is_some() { Ok(None) } else { take(&mut self.buffer) }
    }

    /// Sends a standby status update: `flushed` is the persisted position, never more.
    ///
    /// # Errors
    /// When the connection is gone or takes no bytes for ten seconds.
    pub async fn status(&mut self, received: Lsn, flushed: Lsn, ask_reply: bool) -> Result<()> {
        let mut out = BytesMut::with_capacity(39);
        out.put_u8(b'd');
        out.put_i32(4 + 34);
        out.put_u8(b'r');
        out.put_u64(received.max(flushed).into());
        out.put_u64(flushed.into());
        out.put_u64(flushed.into()); // applied: the broker has it
        out.put_i64(unix_to_pg_timestamp(unix_micros()));
        out.put_u8(ask_reply.into());
        self.send(&out).await
    }

    /// Ends the stream in good order (CopyDone, Terminate).
    pub async fn finish(mut self) {
        let mut out = BytesMut::new();
        frontend::copy_done(&mut out);
        frontend::terminate(&mut out);
        // The last status update went before; if this is lost, only a log line of the server differs.
        let _ = self.send(&out).await;
        let _ = timeout(Duration::from_secs(1), self.socket.shutdown()).await;
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        match timeout(WRITE_TIMEOUT, self.socket.write_all(bytes)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(Error::wait("the replication connection is gone").because(e)),
            Err(_) => Err(Error::wait("the replication connection takes no status update")),
        }
    }
}

fn unix_micros() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

fn lost(endpoint: &Endpoint, e: std::io::Error) -> Error {
    let hint = match e.kind() {
        std::io::ErrorKind::UnexpectedEof => " (a pooler that does not speak the replication protocol?)",
        _ => "",
    };
    Error::wait(format!("lost the connection to PostgreSQL at {endpoint}{hint}")).because(e)
}

/// Takes the next complete message of a stream off the buffer, which holds what was read so far.
///
/// # Errors
/// When the server ends the stream or breaks the protocol.
pub fn take(buffer: &mut BytesMut) -> Result<Option<Received>> {
    loop {
        let Some((tag, body)) = take_message(buffer)? else { return Ok(None) };
        return match tag {
            b'd' => match parse_copy_data(body) {
                Ok(ReplicationCopyData::XLogData { wal_start, data, .. }) => {
                    Ok(Some(Received::Wal { lsn: Lsn::from(wal_start.0), data }))
                }
                Ok(ReplicationCopyData::KeepAlive { wal_end, reply_requested, .. }) => {
                    Ok(Some(Received::Keepalive { wal_end: Lsn::from(wal_end.0), reply_requested }))
                }
                Err(e) => Err(Error::wait("the replication stream is malformed").because(e)),
            },
            b'N' => {
                let fields = ErrorFields::parse(&body);
                // Texts are translated, codes are not: object_not_in_prerequisite_state.
                let rows_skipped = fields.code.as_deref() == Some("55000");
                Ok(Some(Received::Notice { rows_skipped, text: fields.to_error_string() }))
            }
            b'E' => {
                let error = server_error("the server ended the replication stream", &body);
                // undefined_object, before version 18: decoding looks the publication up as of
                // the row, where there was none.
                match ErrorFields::parse(&body).code.as_deref() {
                    Some("42704") => Err(Error::refusal(Refusal::Publication, error.line())),
                    _ => Err(error),
                }
            }
            b'c' => Err(Error::wait("the server ended the replication stream")),
            b'S' => continue, // a setting was changed by reload
            other => Err(Error::wait(format!(
                "unexpected message {:?} in the replication stream",
                char::from(other)
            ))),
        };
    }
}

/// Cuts one message off the buffer: tag, 4-byte length that counts itself, body.
fn take_message(buffer: &mut BytesMut) -> Result<Option<(u8, Bytes)>> {
    let Some((header, _)) = buffer.split_first_chunk::<5>() else { return Ok(None) };
    let tag = header[0];
    let len = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
    if !(4..=MAX_MESSAGE_BYTES).contains(&len) {
        return Err(Error::wait(format!("the server sent a message of impossible length {len}")));
    }
    if buffer.len() < 1 + len {
        return Ok(None);
    }
    let mut message = buffer.split_to(1 + len).freeze();
    message.advance(5);
    Ok(Some((tag, message)))
}

fn data_row(body: &[u8]) -> Option<Row> {
    let mut rest = body;
    let count = rest.try_get_u16().ok()?;
    (0..count)
        .map(|_| match rest.try_get_i32().ok()? {
            -1 => Some(None),
            len => {
                let (value, tail) = rest.split_at_checked(usize::try_from(len).ok()?)?;
                rest = tail;
                Some(Some(String::from_utf8_lossy(value).into_owned()))
            }
        })
        .collect()
}

fn server_error(what: &str, body: &[u8]) -> Error {
    let fields = ErrorFields::parse(body);
    let code = fields.code.as_deref().unwrap_or_default();
    let detail = fields.detail.as_deref().map_or(String::new(), |d| format!(" ({d})"));
    let kind = match code {
        // In the stream these are states of the slot, which the start check tells apart.
        "42704" | "55000" => Kind::Wait,
        // unrecognized parameter: a pooler that does not know `replication`
        "08P01" => Kind::Mistake,
        code => sqlstate_kind(code),
    };
    Error::new(kind, format!("{what}: {}{detail}", fields.to_error_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_cut_only_when_complete() {
        let mut buffer = BytesMut::from(&b"Z\0\0\0\x05"[..]);
        assert!(take_message(&mut buffer).unwrap().is_none());
        buffer.extend_from_slice(b"Id");
        assert_eq!(take_message(&mut buffer).unwrap(), Some((b'Z', Bytes::from_static(b"I"))));
        assert_eq!(&buffer[..], b"d");
    }

    #[test]
    fn an_impossible_length_is_an_error_and_reserves_nothing() {
        for length in [&b"d\0\0\0\x03"[..], b"d\xff\xff\xff\xff"] {
            let mut buffer = BytesMut::from(length);
            assert!(take_message(&mut buffer).is_err());
        }
    }

    #[test]
    fn data_rows_are_read_with_nulls() {
        let body = b"\0\x02\xff\xff\xff\xff\0\0\0\x02ab";
        assert_eq!(data_row(body), Some(vec![None, Some("ab".into())]));
        assert_eq!(data_row(b"\0\x01\0\0\0\x09a"), None);
    }
}
