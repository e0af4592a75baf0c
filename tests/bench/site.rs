//! What all runs share: the broker, Debezium, a second network namespace. What is not to be had here is
//! left out, and said.

use std::path::{Path, PathBuf};
use std::process::Command;

use tokio::signal::unix::{SignalKind, signal};

use crate::support::servers::{self, Kafka};

pub struct Site {
    pub kafka: Kafka,
    /// The broker as the other namespace sees it.
    pub brokers_for_veth: Option<String>,
    pub veth: Result<Veth, String>,
    /// Kafka Connect's jars and Debezium's.
    pub connect: Result<PathBuf, String>,
}

impl Site {
    pub fn new(wants_veth: bool, wants_connect: bool) -> Self {
        let unwanted = || "not asked for".to_owned();
        let veth = if wants_veth { Veth::new() } else { Err(unwanted()) };
        let connect = if wants_connect { fetch_connect() } else { Err(unwanted()) };
        let port = servers::free_port();
        let listeners = veth.as_ref().map(|veth| {
            let far = format!("{}:{port}", veth.address);
            (format!("listeners=PLAINTEXT://127.0.0.1:{{port}},VETH://{far}"), far)
        });
        let map = "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,VETH:PLAINTEXT";
        let kafka = match &listeners {
            Ok((listeners, _)) => Kafka::start(&[listeners, map]),
            Err(_) => Kafka::start(&[]),
        };
        Site { kafka, brokers_for_veth: listeners.ok().map(|(_, far)| far), veth, connect }
    }
}

/// Servers outlive whoever started them: when told to stop, stop them, too.
pub fn stop_servers_on_signals() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    std::thread::spawn(move || {
        let name = runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate()).unwrap();
            let mut interrupt = signal(SignalKind::interrupt()).unwrap();
            tokio::select! { _ = terminate.recv() => "SIGTERM", _ = interrupt.recv() => "SIGINT" }
        });
        eprintln!("{name}: stopping the servers");
        let ours = format!("{}-", std::process::id());
        for entry in std::fs::read_dir(format!("{}/.dev/test", servers::ROOT)).into_iter().flatten().flatten()
        {
            let folder = entry.path();
            if entry.file_name().to_string_lossy().starts_with(&ours) {
                stop("postgres.sh", &folder.join("data"), "immediate");
                stop("kafka.sh", &folder, "KILL");
                let _ = std::fs::remove_dir_all(folder);
            }
        }
        let _ = ip(&format!("netns delete {}", namespace()));
        std::process::exit(130);
    });
}

fn stop(script: &str, folder: &Path, how: &str) {
    let _ =
        Command::new(format!("{}/scripts/{script}", servers::ROOT)).arg("stop").arg(folder).arg(how).status();
}

fn namespace() -> String {
    format!("obx{}", std::process::id())
}

fn fetch_connect() -> Result<PathBuf, String> {
    let script = format!("{}/scripts/connect.sh", servers::ROOT);
    let output = Command::new(script).arg("fetch").output().map_err(|e| e.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let fetched = text(&output.stdout).lines().last().map(PathBuf::from);
    fetched.filter(|_| output.status.success()).ok_or_else(|| text(&output.stderr))
}

/// A network namespace, joined to ours by a veth pair; removed when dropped.
pub struct Veth {
    namespace: String,
    /// Our end of the pair, where the servers listen.
    pub address: String,
}

impl Veth {
    fn new() -> Result<Self, String> {
        let number = std::process::id();
        let namespace = namespace();
        // Of the range that is set aside for benchmarks (RFC 2544).
        let net = format!("198.18.{}", number % 256);
        let veth = Veth { namespace: namespace.clone(), address: format!("{net}.1") };
        let (near, far) = (format!("{namespace}a"), format!("{namespace}b"));
        ip(&format!("netns add {namespace}"))?;
        ip(&format!("link add {near} type veth peer name {far} netns {namespace}"))?;
        ip(&format!("address add {net}.1/30 dev {near}"))?;
        ip(&format!("link set {near} up"))?;
        ip(&format!("-n {namespace} address add {net}.2/30 dev {far}"))?;
        ip(&format!("-n {namespace} link set {far} up"))?;
        ip(&format!("-n {namespace} link set lo up"))?;
        Ok(veth)
    }

    /// The same command in the namespace; `ip` becomes the program, so that its pid is the program's.
    pub fn enter(&self, command: &Command) -> Command {
        let mut entered = Command::new("ip");
        entered.args(["netns", "exec", &self.namespace]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            if let Some(value) = value {
                entered.env(name, value);
            }
        }
        entered
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        let _ = ip(&format!("netns delete {}", self.namespace));
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
    let error = || format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim());
    output.status.success().then_some(()).ok_or_else(error)
}
