//! Somebody in the middle: ends the client's TLS with a certificate of their own, and passes what
//! is said inside on to the server over TLS again.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// `SSLRequest` (PostgreSQL manual, "Message Formats").
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

pub struct Interceptor {
    pub server_port: u16,
    /// Signs the server's own certificate, for `localhost`.
    pub authority: String,
    /// What the client is shown: certificate and key.
    pub shown: (String, String),
    /// Which connection is intercepted, from 0; the others pass untouched. `None`: all.
    pub connection: Option<usize>,
}

impl Interceptor {
    /// Serves until the tests end; gives the port.
    pub fn start(self) -> u16 {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        std::thread::spawn(move || runtime.block_on(self.serve(listener)));
        port
    }

    async fn serve(self, listener: std::net::TcpListener) {
        let listener = TcpListener::from_std(listener).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.as_bytes()).unwrap()).unwrap();
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let certificate = CertificateDer::from_pem_slice(self.shown.0.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(self.shown.1.as_bytes()).unwrap();
        let server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        let (acceptor, connector) =
            (TlsAcceptor::from(Arc::new(server)), TlsConnector::from(Arc::new(client)));
        for number in 0.. {
            let (mut near, _) = listener.accept().await.unwrap();
            let mut far = TcpStream::connect(("127.0.0.1", self.server_port)).await.unwrap();
            let (acceptor, connector) = (acceptor.clone(), connector.clone());
            let intercepted = self.connection.is_none_or(|n| n == number);
            // Either end may go away at any time.
            tokio::spawn(async move {
                if !intercepted {
                    return copy_bidirectional(&mut near, &mut far).await.map(drop);
                }
                let mut request = [0; 8];
                near.read_exact(&mut request).await?;
                near.write_all(b"S").await?;
                let mut near = acceptor.accept(near).await?;
                far.write_all(&SSL_REQUEST).await?;
                far.read_exact(&mut request[..1]).await?;
                let name = ServerName::try_from("localhost").unwrap();
                let mut far = connector.connect(name, far).await?;
                copy_bidirectional(&mut near, &mut far).await.map(drop)
            });
        }
    }
}
