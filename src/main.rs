//! Parses the command line, sets up logs and signals, maps errors to exit codes.

use std::io::{IsTerminal, Write as _};
use std::process::ExitCode;

use clap::Parser;
use outbox_tailer::cli::{Cli, Command, LogFormat};
use outbox_tailer::commands::{demo, init, run, skip};
use outbox_tailer::config::{self, Config};
use outbox_tailer::error::{Error, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

/// Exit code after a second signal.
const FORCED: i32 = 5;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = set_up_logs(&cli).and_then(|()| {
        let runtime = match cli.command {
            // Stream, position and witness on one thread: nothing is handed from one to another.
            Command::Run(_) => tokio::runtime::Builder::new_current_thread().enable_all().build(),
            _ => tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build(),
        };
        let runtime = runtime.map_err(|e| Error::bug("cannot start the runtime").because(e))?;
        let result = runtime.block_on(command(cli));
        // A blocked call into librdkafka must not hold up the exit.
        runtime.shutdown_timeout(std::time::Duration::from_secs(1));
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error.line());
            ExitCode::from(error.exit_code())
        }
    }
}

async fn command(cli: Cli) -> Result<()> {
    if let Command::Demo(args) = &cli.command {
        return demo::demo(&cli.common, args, stop_on_signals()?).await;
    }
    let mut overrides = cli.common.overrides();
    if let Command::Run(args) = &cli.command {
        overrides.exit_on_refusal = args.exit_on_refusal;
    }
    let config: Config = config::load(cli.common.config.as_deref(), config::environment(), &overrides)?;
    match cli.command {
        Command::Run(_) => run::run(&config, stop_on_signals()?).await,
        Command::Init(args) => init::init(&config, &args).await,
        Command::Skip(args) => skip::skip(&config, &args).await,
        Command::Demo(_) => unreachable!("handled above"),
    }
}

/// The first SIGTERM or SIGINT asks to stop, the second one forces.
fn stop_on_signals() -> Result<watch::Receiver<bool>> {
    let failed = |e| Error::bug("cannot listen for signals").because(e);
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(async move {
        for forced in [false, true] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if forced {
                say("forced to stop; what was in flight follows at the next start");
                std::process::exit(FORCED);
            }
            let _ = stop.send(true);
        }
    });
    Ok(stopped)
}

/// For people; nobody may be there to read it (`eprintln!` would panic).
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "outbox-tailer: {line}");
}

fn set_up_logs(cli: &Cli) -> Result<()> {
    // Commands print what they do; only the worker's log is for reading along.
    let default = if matches!(cli.command, Command::Run(_)) { "info" } else { "warn" };
    let directives = cli.common.log.as_deref().unwrap_or(default);
    let filter = EnvFilter::try_new(directives)
        .map_err(|e| Error::mistake(format!("--log {directives:?} is no filter")).because(e))?;
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        // It would say on stderr that stderr cannot be written, and panic.
        .log_internal_errors(false);
    match cli.common.log_format {
        LogFormat::Json => logs.json().flatten_event(true).init(),
        LogFormat::Auto | LogFormat::Text => logs.with_ansi(std::io::stderr().is_terminal()).init(),
    }
    Ok(())
}
