//! `outbox-tailer` tails a PostgreSQL outbox table through a logical replication slot into Kafka.
//!
//! One direction, one noun for each stage:
//!
//! ```text
//! slot ──CopyData──▶ pgoutput message ──▶ outbox event ──▶ record ──▶ Kafka
//!                                                                     │ ack
//! slot ◀──confirmed flush LSN── persisted position ◀── progress ◀──────┘
//! ```
//!
//! # What always holds
//!
//! - Order of truth: broker acknowledged → position row committed → witness written → slot told.
//!   Never otherwise, not even at shutdown.
//! - Only [`relay::progress`] yields an LSN that may be confirmed: the end of a commit, or a
//!   keepalive's WAL end outside a transaction, with everything before it acknowledged.
//! - After a failed delivery nothing else is sent by that producer. The stream restarts from the
//!   persisted position; one event is never retried alone.
//! - A session owns relay, producer, keeper and stream. What was in flight ends with it.
//! - Whatever may mean lost history stops the stream until an operator's command clears it.
//!
//! # Modules in reading order
//!
//! - [`relay`]: the pure core. No I/O, no clock, no tasks; builds without the `worker` feature, as
//!   does the next one. The simulator (`tests/sim`) runs both.
//! - [`startcheck`]: may the stream start here?
#![cfg_attr(
    feature = "worker",
    doc = "
- [`session`]: one `START_REPLICATION` lifetime, and the only loop over it.
- [`source`]: the replication session: connect, authenticate, stream, status updates.
- [`kafka`]: the idempotent producer and what is asked of the brokers.
- [`position`], [`descriptor`]: the persisted position and what the publication must still be.
- [`witness`]: the record outside the database that shows what a failover or a restore has lost.
- [`commands`]: `run` puts these together; `init`, `skip`, `demo`.
- [`postgres`], [`tls`], [`config`], [`cli`], [`error`]: what all of them stand on.
"
)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod relay;
pub mod startcheck;

#[cfg(feature = "worker")]
pub mod cli;
#[cfg(feature = "worker")]
pub mod commands;
#[cfg(feature = "worker")]
pub mod config;
#[cfg(feature = "worker")]
pub mod descriptor;
#[cfg(feature = "worker")]
pub mod error;
#[cfg(feature = "worker")]
pub mod kafka;
#[cfg(feature = "worker")]
pub mod position;
#[cfg(feature = "worker")]
pub mod postgres;
#[cfg(feature = "worker")]
pub mod session;
#[cfg(feature = "worker")]
pub mod source;
#[cfg(feature = "worker")]
pub mod tls;
#[cfg(feature = "worker")]
pub mod witness;
