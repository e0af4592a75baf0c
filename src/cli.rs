//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::Overrides;

/// Tails a PostgreSQL outbox table through a logical replication slot into Kafka.
#[derive(Debug, Parser)]
#[command(version, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(flatten)]
    pub common: Common,
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 a bug; 2 a mistake in what was given (nothing was changed); 3 a refusal \
(history may be lost, or an event cannot be published); 4 something was not there in time; \
5 forced by a second signal.";

#[derive(Debug, Args)]
pub struct Common {
    /// Configuration file (TOML)
    #[arg(long, short, global = true, env = "OUTBOX_TAILER_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// PostgreSQL, as postgres://user:password@host:port/database or key=value pairs
    #[arg(long, global = true, value_name = "URL")]
    pub database_url: Option<String>,
    /// Kafka brokers, as host:port,host:port
    #[arg(long, global = true, value_name = "LIST")]
    pub brokers: Option<String>,
    /// Name of the replication slot
    #[arg(long, global = true, value_name = "NAME")]
    pub slot: Option<String>,
    /// Name of the publication
    #[arg(long, global = true, value_name = "NAME")]
    pub publication: Option<String>,
    /// Logs as lines of JSON
    #[arg(long, global = true, env = "OUTBOX_TAILER_LOG_FORMAT", value_enum, default_value_t = LogFormat::Auto, value_name = "FORMAT")]
    pub log_format: LogFormat,
    /// Which logs: a level, or tracing directives [default: info for run, else warn]
    #[arg(long, global = true, env = "OUTBOX_TAILER_LOG", value_name = "FILTER")]
    pub log: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people
    Auto,
    Text,
    Json,
}

impl Common {
    pub fn overrides(&self) -> Overrides {
        Overrides {
            url: self.database_url.clone(),
            brokers: self.brokers.clone(),
            slot: self.slot.clone(),
            publication: self.publication.clone(),
            exit_on_refusal: false,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Publish what is committed to the outbox, until told to stop
    Run(RunArgs),
    /// Make publication, slot and position; run it again after a change of the outbox tables
    Init(InitArgs),
    /// Go past an event that cannot be published (the worker's refusal names it)
    Skip(SkipArgs),
    /// Show the whole way on a sample database: a producer, the worker, a consumer
    Demo(DemoArgs),
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// Exit with code 3 at a refusal, instead of staying up and not ready
    #[arg(long)]
    pub exit_on_refusal: bool,
}

#[derive(Debug, Args, Default)]
pub struct InitArgs {
    /// Print each SQL statement instead of running it
    #[arg(long)]
    pub dry_run: bool,
    /// Rows that are in the outbox already are never published
    #[arg(long)]
    pub from_now: bool,
    /// Take over an existing pgoutput slot at the position it has confirmed
    #[arg(long, value_name = "NAME")]
    pub adopt_slot: Option<String>,
    /// Drop slot and position and make them anew: what was not streamed yet never will be
    #[arg(long)]
    pub start_over: bool,
    /// Record the Kafka cluster and the topics' partition counts anew
    #[arg(long)]
    pub accept_kafka: bool,
    /// How long to wait for locks and for old transactions, in seconds
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub wait: u64,
    /// Also install the sample domain (sales_order, outbox_event)
    #[arg(long)]
    pub sample: bool,
}

#[derive(Debug, Args)]
pub struct SkipArgs {
    /// The id that the refusal names
    pub event_id: String,
    /// Why; goes into the audit record
    #[arg(long, default_value = "")]
    pub reason: String,
}

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// End after so many events, with a summary line; without it, run until Ctrl-C
    #[arg(long, value_name = "N")]
    pub events: Option<u64>,
    /// Events a second; 0 is as fast as possible
    #[arg(long, default_value_t = 200, value_name = "N")]
    pub rate: u32,
}
