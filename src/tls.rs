//! One rustls configuration for both kinds of PostgreSQL session, with libpq's meaning of the modes.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::config::{Tls, TlsMode};
use crate::error::{Error, Result};

/// Builds the client configuration; certificates are read anew at each call, so that rotated ones
/// are picked up at the next connect.
///
/// # Errors
/// A mistake that names the file when one cannot be read or holds no certificate.
pub fn client_config(tls: &Tls, mode: TlsMode) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let checks = match (mode, &tls.ca_file) {
        (TlsMode::VerifyFull, _) => Checks::ChainAndName(chain(tls, &provider)?),
        (TlsMode::VerifyCa, _) | (TlsMode::Require, Some(_)) => Checks::Chain(chain(tls, &provider)?),
        (TlsMode::Disable | TlsMode::Prefer | TlsMode::Require, _) => Checks::Nothing,
    };
    let verifier = Arc::new(Verifier { checks, provider: Arc::clone(&provider) });
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| Error::bug("TLS versions").because(e))?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    match (&tls.certificate_file, &tls.key_file) {
        (Some(certificate), Some(key)) => {
            let chain = certificates(certificate)?;
            let key_der = PrivateKeyDer::from_pem_file(key).map_err(|e| unreadable(key, "private key", e))?;
            builder.with_client_auth_cert(chain, key_der).map_err(|e| {
                Error::mistake(format!("{} does not fit {}", key.display(), certificate.display())).because(e)
            })
        }
        _ => Ok(builder.with_no_client_auth()),
    }
}

fn chain(tls: &Tls, provider: &Arc<CryptoProvider>) -> Result<Arc<WebPkiServerVerifier>> {
    let mut roots = RootCertStore::empty();
    match &tls.ca_file {
        Some(path) => {
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|e| unreadable(path, "CA certificate", e))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider)).build().map_err(|e| {
        Error::mistake("no certificate authority to verify the server with: set postgres.tls_ca_file, or install the system's")
            .because(e)
    })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|e| unreadable(path, "certificate", e))?;
    if certificates.is_empty() {
        return Err(Error::mistake(format!("{} holds no PEM certificate", path.display())));
    }
    Ok(certificates)
}

fn unreadable(path: &Path, what: &str, e: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::mistake(format!("cannot read the {what} in {}", path.display())).because(e)
}

/// What of the server's certificate is checked.
#[derive(Debug)]
enum Checks {
    Nothing,
    Chain(Arc<WebPkiServerVerifier>),
    ChainAndName(Arc<WebPkiServerVerifier>),
}

#[derive(Debug)]
struct Verifier {
    checks: Checks,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match &self.checks {
            Checks::Nothing => Ok(ServerCertVerified::assertion()),
            Checks::ChainAndName(inner) => {
                inner.verify_server_cert(end_entity, intermediates, name, ocsp, now)
            }
            // The name is checked last, so a wrong one means that the chain was right.
            Checks::Chain(inner) => {
                match inner.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
                    Err(rustls::Error::InvalidCertificate(
                        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
                    )) => Ok(ServerCertVerified::assertion()),
                    other => other,
                }
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
