//! The socket under a replication session, and the way it is read.
//!
//! The walsender makes one `send` for each message. While our receive window is open each of them
//! becomes a segment and often a wake-up of its own; while the window is shut they gather in the
//! server's send queue and leave in segments of 64 KiB. So a reader that is behind lets the window
//! shut: a small fixed receive buffer, reads of 32 KiB, and a short sleep until the kernel's queue
//! has stopped growing. That more than doubles what the *server* can do. When caught up (the session
//! knows by how much WAL is left) there is nothing to gather, and every byte is read at once.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use sha2::Digest;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio::time::Instant;
use tokio_postgres::config::Host;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use x509_cert::der::Decode;
use x509_cert::der::oid::db::rfc5912;

use crate::config::{Postgres, TlsMode};
use crate::error::{Error, Result};
use crate::postgres::Endpoint;
use crate::tls;

const READ_BYTES: usize = 32 << 10;
/// A queue that stops growing below this has not shut the window: the server is the slower one.
const SHUT_MIN_BYTES: usize = 16 << 10;
/// Enough to read, whatever the kernel would still take.
const SHUT_MAX_BYTES: usize = 512 << 10;
const NAP: Duration = Duration::from_millis(1);
const RECEIVE_BUFFER_BYTES: usize = 128 << 10;
/// A small receive buffer on a longer path would hold up the server.
const LONG_ROUND_TRIP: Duration = Duration::from_millis(3);

pub struct Socket {
    transport: Transport,
    /// Bytes read since the kernel's queue was last looked at.
    unlooked_bytes: usize,
    /// A queue of this length means that the window is shut.
    shut_bytes: usize,
    nap: Option<Nap>,
    pub reads: Reads,
}

/// A pause in which bytes gather.
struct Nap {
    until: Instant,
    /// At its beginning.
    queued_bytes: usize,
}

impl Nap {
    fn new(queued_bytes: usize) -> Self {
        Nap { until: Instant::now() + NAP, queued_bytes }
    }
}

/// How often was read, and how often the window was let shut before.
#[derive(Debug, Default, Clone, Copy)]
pub struct Reads {
    pub all: u64,
    pub gathered: u64,
}

enum Transport {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Socket {
    /// Connects, and negotiates TLS as the settings ask.
    ///
    /// # Errors
    /// A wait when nobody answers, a mistake when TLS is asked for and not to be had.
    pub async fn open(settings: &Postgres, endpoint: &Endpoint) -> Result<Self> {
        let unreachable = |e| Error::wait(format!("cannot connect to PostgreSQL at {endpoint}")).because(e);
        let transport = match &endpoint.host {
            Host::Unix(directory) => {
                let path = directory.join(format!(".s.PGSQL.{}", endpoint.port));
                Transport::Unix(UnixStream::connect(path).await.map_err(unreachable)?)
            }
            Host::Tcp(name) => {
                let tcp = connect_tcp(settings, name, endpoint.port).await.map_err(unreachable)?;
                negotiate(settings, endpoint, name, tcp).await?
            }
        };
        Ok(Socket {
            transport,
            unlooked_bytes: READ_BYTES,
            shut_bytes: SHUT_MAX_BYTES,
            nap: None,
            reads: Reads::default(),
        })
    }

    /// Digest of the server's certificate for `tls-server-end-point` channel binding (RFC 5929):
    /// with the hash of its signature, SHA-256 in place of MD5 and SHA-1.
    pub fn channel_binding(&self) -> Option<Vec<u8>> {
        use rfc5912::{
            ECDSA_WITH_SHA_384, ECDSA_WITH_SHA_512, SHA_384_WITH_RSA_ENCRYPTION, SHA_512_WITH_RSA_ENCRYPTION,
        };
        let Transport::Tls(stream) = &self.transport else { return None };
        let der = stream.get_ref().1.peer_certificates()?.first()?;
        let oid = x509_cert::Certificate::from_der(der).ok()?.signature_algorithm.oid;
        Some(match oid {
            SHA_384_WITH_RSA_ENCRYPTION | ECDSA_WITH_SHA_384 => sha2::Sha384::digest(der).to_vec(),
            SHA_512_WITH_RSA_ENCRYPTION | ECDSA_WITH_SHA_512 => sha2::Sha512::digest(der).to_vec(),
            rfc5912::ID_RSASSA_PSS => return None, // names its hash elsewhere
            oid if oid.to_string().starts_with("1.3.101.") => return None, // Ed25519, Ed448: no hash
            _ => sha2::Sha256::digest(der).to_vec(),
        })
    }

    /// Waits for bytes and appends them; cancel-safe.
    pub async fn fill(&mut self, buffer: &mut BytesMut) -> io::Result<()> {
        buffer.reserve(READ_BYTES);
        let read = self.transport.read_buf(&mut buffer.limit(READ_BYTES)).await?;
        self.unlooked_bytes += read;
        self.reads.all += 1;
        if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    /// The same for a reader that is behind: lets the window shut first. Cancel-safe: a nap goes on
    /// where it was.
    pub async fn fill_behind(&mut self, buffer: &mut BytesMut) -> io::Result<()> {
        // TLS gives half of what a plain read does.
        if self.nap.is_none() && self.unlooked_bytes >= READ_BYTES && self.transport.has_window() {
            self.unlooked_bytes = 0;
            let queued = self.transport.queued_bytes()?;
            self.nap = (queued < self.shut_bytes).then(|| Nap::new(queued));
            self.reads.gathered += u64::from(self.nap.is_some());
        }
        while let Some(nap) = &self.nap {
            tokio::time::sleep_until(nap.until).await;
            let queued = self.transport.queued_bytes()?;
            if queued > nap.queued_bytes && queued < SHUT_MAX_BYTES {
                self.nap = Some(Nap::new(queued));
                continue;
            }
            if queued >= SHUT_MIN_BYTES {
                self.shut_bytes = queued - queued / 8;
            }
            self.nap = None;
        }
        self.fill(buffer).await
    }

    pub async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.transport.write_all(bytes).await?;
        self.transport.flush().await
    }

    pub async fn shutdown(&mut self) -> io::Result<()> {
        self.transport.shutdown().await
    }
}

/// Tries each address of the name; the name is resolved anew at every connect.
async fn connect_tcp(settings: &Postgres, name: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in tokio::net::lookup_host((name, port)).await? {
        match connect_address(settings, address).await {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

async fn connect_address(settings: &Postgres, address: SocketAddr) -> io::Result<TcpStream> {
    if settings.receive_buffer_bytes != Some(0) {
        // The handshake takes one round trip; a busy machine may be late once.
        for _ in 0..3 {
            let asked = Instant::now();
            let bytes = settings.receive_buffer_bytes.unwrap_or(RECEIVE_BUFFER_BYTES);
            let stream = connect_with(settings, address, Some(bytes)).await?;
            if settings.receive_buffer_bytes.is_some() || asked.elapsed() < LONG_ROUND_TRIP {
                return Ok(stream);
            }
        }
    }
    connect_with(settings, address, None).await
}

async fn connect_with(
    settings: &Postgres,
    address: SocketAddr,
    receive_buffer_bytes: Option<usize>,
) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    let options = socket2::SockRef::from(&socket);
    if let Some(bytes) = receive_buffer_bytes {
        // Before connecting: it also fixes the window scale.
        options.set_recv_buffer_size(bytes)?;
    }
    options.set_tcp_nodelay(true)?;
    let keepalive =
        socket2::TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(5));
    options.set_tcp_keepalive(&keepalive.with_retries(3))?;
    options.set_tcp_user_timeout(Some(settings.silence_timeout))?;
    socket.connect(address).await
}

/// PostgreSQL manual, "SSL Session Encryption": SSLRequest, answered by one byte.
async fn negotiate(
    settings: &Postgres,
    endpoint: &Endpoint,
    name: &str,
    mut tcp: TcpStream,
) -> Result<Transport> {
    let mode = endpoint.tls_mode(settings);
    if mode == TlsMode::Disable {
        return Ok(Transport::Tcp(tcp));
    }
    let lost = |e| Error::wait(format!("cannot negotiate TLS with {endpoint}")).because(e);
    let mut request = BytesMut::new();
    postgres_protocol::message::frontend::ssl_request(&mut request);
    tcp.write_all(&request).await.map_err(lost)?;
    match tcp.read_u8().await.map_err(lost)? {
        b'S' => {}
        b'N' if mode == TlsMode::Prefer => return Ok(Transport::Tcp(tcp)),
        b'N' => {
            return Err(Error::mistake(format!(
                "PostgreSQL at {endpoint} has no TLS, and postgres.tls_mode asks for it"
            )));
        }
        _ => {
            return Err(Error::wait(format!("PostgreSQL at {endpoint} does not answer the request for TLS")));
        }
    }
    let server_name = rustls::pki_types::ServerName::try_from(name.to_owned())
        .map_err(|e| Error::mistake(format!("{name} cannot stand in a certificate")).because(e))?;
    let connector = TlsConnector::from(Arc::new(tls::client_config(&settings.tls, mode)?));
    let stream = connector.connect(server_name, tcp).await.map_err(|e| {
        let ours = e.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
        let what = format!("TLS with {endpoint} fails");
        if ours { Error::mistake(what).because(e) } else { Error::wait(what).because(e) }
    })?;
    Ok(Transport::Tls(Box::new(stream)))
}

impl Transport {
    /// A Unix socket has none: a sleep would only hold up its sender.
    fn has_window(&self) -> bool {
        !matches!(self, Transport::Unix(_))
    }

    /// Bytes waiting in the kernel.
    fn queued_bytes(&self) -> io::Result<usize> {
        let queued = match self {
            Transport::Unix(unix) => rustix::io::ioctl_fionread(unix)?,
            Transport::Tcp(tcp) => rustix::io::ioctl_fionread(tcp)?,
            Transport::Tls(stream) => rustix::io::ioctl_fionread(stream.get_ref().0)?,
        };
        Ok(usize::try_from(queued).unwrap_or(usize::MAX))
    }
}

macro_rules! each {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Transport::Tcp($stream) => $call,
            Transport::Unix($stream) => $call,
            Transport::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for Transport {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Transport {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}
