pub mod relay;

#[cfg(feature = "worker")]
pub mod config;
#[cfg(feature = "worker")]
pub mod error;
#[cfg(feature = "worker")]
pub mod postgres;
#[cfg(feature = "worker")]
pub mod tls;
