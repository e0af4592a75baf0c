//! The program as its users run it: a process, its exit code, its log.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_outbox-tailer");

/// What a command printed and how it ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// The one line that a mistake prints.
    pub fn line(&self) -> &str {
        self.stderr.trim()
    }
}

pub fn program(config: &Path, arguments: &[&str]) -> Command {
    // The benchmark brings a release build of its own.
    let mut command =
        Command::new(std::env::var_os("OUTBOX_TAILER_PROGRAM").unwrap_or_else(|| PROGRAM.into()));
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .arg("--config")
        .arg(config)
        .args(arguments)
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end.
pub fn run(config: &Path, arguments: &[&str]) -> Ended {
    end(&mut program(config, arguments))
}

/// Runs a command that finds its settings in the environment, with no configuration file.
pub fn run_in(environment: &[(&str, &str)], arguments: &[&str]) -> Ended {
    let mut command = Command::new(PROGRAM);
    end(command.env_clear().envs(environment.iter().copied()).args(arguments).stdin(Stdio::null()))
}

/// A command that should end and does not, fails the test instead of holding it up.
fn end(command: &mut Command) -> Ended {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id().to_string();
    let (ended, watched) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if watched.recv_timeout(Duration::from_secs(120)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let _ = Command::new("kill").args(["-s", "KILL", &pid]).status();
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(ended);
    watchdog.join().unwrap();
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Starts a command that the test will disturb.
pub fn spawn(config: &Path, arguments: &[&str]) -> Child {
    program(config, arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A running worker (`run`, with its log as JSON); killed when dropped.
pub struct Worker {
    child: Child,
    log: Arc<Mutex<Vec<Value>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Worker {
    pub fn start(config: &Path, arguments: &[&str]) -> Self {
        Self::start_in(&[], config, arguments)
    }

    /// With these variables beside its usual environment.
    pub fn start_in(environment: &[(&str, &str)], config: &Path, arguments: &[&str]) -> Self {
        let mut arguments = arguments.to_vec();
        arguments.splice(0..0, ["--log-format", "json", "run"]);
        let mut command = program(config, &arguments);
        command.envs(environment.iter().copied()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let sink = Arc::clone(&log);
        let reader = std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                // The last line of a mistake is for people.
                let value =
                    serde_json::from_str(&line).unwrap_or_else(|_| serde_json::json!({ "message": line }));
                sink.lock().unwrap().push(value);
            }
        });
        Worker { child, log, reader: Some(reader) }
    }

    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    pub fn log(&self) -> Vec<Value> {
        self.log.lock().unwrap().clone()
    }

    /// Messages of the log that contain the text.
    pub fn logged(&self, text: &str) -> Vec<Value> {
        self.log()
            .into_iter()
            .filter(|line| line["message"].as_str().is_some_and(|m| m.contains(text)))
            .collect()
    }

    /// Waits until the log has a message that contains the text.
    pub fn says(&mut self, text: &str) -> Value {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(line) = self.logged(text).into_iter().next() {
                return line;
            }
            let ended = self.child.try_wait().unwrap();
            let log = self.log();
            assert!(ended.is_none(), "the worker ended with {ended:?} and did not say {text:?}: {log:#?}");
            assert!(Instant::now() < deadline, "the worker does not say {text:?}: {log:#?}");
            std::thread::sleep(Duration::from_millis(20)); // polls a condition
        }
    }

    /// Waits until it streams, for the `n`th time.
    pub fn streams_again(&mut self, n: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.logged("streaming").len() < n {
            let ended = self.child.try_wait().unwrap();
            let late = Instant::now() > deadline;
            assert!(
                ended.is_none() && !late,
                "does not stream for the {n}th time, {ended:?}: {:#?}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(20)); // polls a condition
        }
    }

    pub fn streams(&mut self) {
        self.streams_again(1);
    }

    /// Waits until it refuses for the given reason; it stays up then.
    pub fn refuses(&mut self, reason: &str) -> String {
        let line = self.says("refused: ");
        assert_eq!(line["refusal"], reason, "{line:#}");
        assert!(self.child.try_wait().unwrap().is_none(), "a refused worker stays up");
        line["message"].as_str().unwrap().to_owned()
    }

    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill").args(["-s", signal, &self.pid().to_string()]).status().unwrap();
        assert!(status.success(), "kill -s {signal}");
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.wait_for(Duration::from_secs(60))
    }

    pub fn wait_for(&mut self, limit: Duration) -> ExitStatus {
        let status = super::within(limit, "the worker ends", &mut || self.child.try_wait().unwrap());
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        status
    }

    /// Asks it to stop; it must end well.
    pub fn stop(&mut self) {
        self.signal("TERM");
        let status = self.wait();
        assert_eq!(status.code(), Some(0), "{:#?}", self.log());
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.wait();
    }

    /// Peak resident size, read from outside.
    pub fn peak_rss_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|l| l.starts_with("VmHWM:")).expect("VmHWM");
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
