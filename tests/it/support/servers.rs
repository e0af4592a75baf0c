//! Real servers, started by the project's own scripts.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use postgres::{Client, NoTls};

use super::proxy::Proxy;

pub const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn script(name: &str, arguments: &[&str]) -> Output {
    script_in(&[], name, arguments)
}

fn script_in(environment: &[(&str, &str)], name: &str, arguments: &[&str]) -> Output {
    Command::new(format!("{ROOT}/scripts/{name}"))
        .args(arguments)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("cannot run scripts/{name}: {e}"))
}

fn must(name: &str, arguments: &[&str]) -> String {
    must_in(&[], name, arguments)
}

fn must_in(environment: &[(&str, &str)], name: &str, arguments: &[&str]) -> String {
    let output = script_in(environment, name, arguments);
    assert!(
        output.status.success(),
        "scripts/{name} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).trim().lines().last().unwrap_or_default().to_owned()
}

/// Why the tests cannot run here; `None` when they can.
pub fn missing() -> Option<String> {
    for (name, arguments) in [("postgres.sh", &["fetch", "18.6"][..]), ("kafka.sh", &["fetch"])] {
        let output = script(name, arguments);
        if !output.status.success() {
            return Some(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
    }
    None
}

/// Where the programs of a version are; all client programs only come with 18.6.
pub fn programs_of(version: &str) -> PathBuf {
    PathBuf::from(must("postgres.sh", &["fetch", version])).join("bin")
}

/// A folder of this test run that an unprivileged server can use.
pub fn folder(name: &str) -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = Path::new(ROOT).join(".dev/test").join(format!("{}-{number}-{name}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// A port that is free, never the same twice. Below the range that the kernel gives to outgoing
/// connections: a client that knocks at a stopped server there may meet itself, or take its port.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(131);
    loop {
        let number = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 11_000 + u16::try_from(number % 20_000).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

pub struct Postgres {
    pub version: String,
    pub data: PathBuf,
    pub port: u16,
    settings: Vec<String>,
}

impl Postgres {
    pub fn start(settings: &[&str]) -> Self {
        Self::start_version("18.6", settings)
    }

    pub fn start_version(version: &str, settings: &[&str]) -> Self {
        let server = Self::stopped(version, settings);
        server.start_again();
        server
    }

    /// Initialised, so that files can be put into its folder before the start.
    pub fn stopped(version: &str, settings: &[&str]) -> Self {
        Self::stopped_in(folder("postgres"), version, settings)
    }

    /// The same in a folder of the test's own.
    pub fn stopped_in(folder: PathBuf, version: &str, settings: &[&str]) -> Self {
        let data = folder.join("data");
        must("postgres.sh", &["init", version, data.to_str().unwrap()]);
        let settings = settings.iter().map(|s| (*s).to_owned()).collect();
        Postgres { version: version.to_owned(), data, port: free_port(), settings }
    }

    /// A copy of a stopped server's data directory, not started.
    pub fn copy_of(server: &Postgres) -> Self {
        let data = folder("copy").join("data");
        let copied = Command::new("cp").arg("-a").args([&server.data, &data]).status().unwrap();
        assert!(copied.success());
        Postgres {
            version: server.version.clone(),
            data,
            port: free_port(),
            settings: server.settings.clone(),
        }
    }

    /// A physical standby, made from a base backup; the server must be an 18.6, which has the program.
    pub fn standby_of(primary: &Postgres, settings: &[&str]) -> Self {
        let standby = Self::stopped_standby_of(primary, settings);
        standby.start_again();
        standby
    }

    pub fn stopped_standby_of(primary: &Postgres, settings: &[&str]) -> Self {
        let data = folder("standby").join("data");
        let program = must("postgres.sh", &["fetch", &primary.version]) + "/bin/pg_basebackup";
        // With a database, for the synchronisation of slots.
        let primary_conninfo = format!("host=127.0.0.1 port={} user=postgres dbname=postgres", primary.port);
        let backup = Command::new(program)
            .args(["-d", &primary_conninfo, "-R", "-c", "fast", "-D"])
            .arg(&data)
            .output()
            .unwrap();
        assert!(backup.status.success(), "{}", String::from_utf8_lossy(&backup.stderr));
        let settings = settings.iter().map(|s| (*s).to_owned()).collect();
        Postgres { version: primary.version.clone(), data, port: free_port(), settings }
    }

    pub fn start_again(&self) {
        let port = self.port.to_string();
        let mut arguments = vec!["start", &self.version, self.data.to_str().unwrap(), &port];
        arguments.extend(self.settings.iter().map(String::as_str));
        must("postgres.sh", &arguments);
    }

    /// `mode`: fast, immediate or smart.
    pub fn stop(&self, mode: &str) {
        must("postgres.sh", &["stop", self.data.to_str().unwrap(), mode]);
    }

    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    pub fn connect(&self, database: &str) -> Client {
        super::eventually("PostgreSQL takes a connection", || {
            Client::connect(&self.url(database), NoTls).ok()
        })
    }

    /// Where the programs of version 18.6 are.
    pub fn programs() -> PathBuf {
        programs_of("18.6")
    }

    pub fn log(&self) -> String {
        let mut path = self.data.clone().into_os_string();
        path.push(".log");
        std::fs::read_to_string(path).unwrap_or_default()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        script("postgres.sh", &["stop", self.data.to_str().unwrap(), "immediate"]);
        let _ = std::fs::remove_dir_all(self.data.parent().unwrap());
    }
}

/// A broker, alone or one of a cluster.
pub struct Kafka {
    pub folder: PathBuf,
    pub port: u16,
    /// The addresses of every broker of the cluster.
    cluster: String,
    properties: Vec<String>,
    environment: Vec<(&'static str, &'static str)>,
}

impl Kafka {
    pub fn start(properties: &[&str]) -> Self {
        let port = free_port();
        let properties = properties.iter().map(|p| p.replace("{port}", &port.to_string())).collect();
        let cluster = format!("127.0.0.1:{port}");
        let kafka = Kafka { folder: folder("kafka"), port, cluster, properties, environment: Vec::new() };
        kafka.start_again();
        kafka
    }

    /// Three brokers, each of which is a controller, too: any two of them go on without the third. A
    /// topic has three replicas, and two of them must be in sync.
    pub fn cluster(properties: &[&str]) -> Vec<Arc<Self>> {
        let nodes: Vec<(u16, u16)> = (0..3).map(|_| (free_port(), free_port())).collect();
        let list = |separator: &str, entry: &dyn Fn(usize) -> String| {
            (0..nodes.len()).map(entry).collect::<Vec<_>>().join(separator)
        };
        let cluster = list(",", &|n| format!("127.0.0.1:{}", nodes[n].0));
        let voters = list(",", &|n| format!("{}@127.0.0.1:{}", n + 1, nodes[n].1));
        let broker = |n: usize| {
            let mut all = vec![
                format!("node.id={}", n + 1),
                format!("controller.quorum.voters={voters}"),
                "default.replication.factor=3".to_owned(),
                "min.insync.replicas=2".to_owned(),
                "offsets.topic.replication.factor=3".to_owned(),
                // A dead follower leaves the in-sync replicas, and a dead controller its office, in
                // seconds (defaults: 30 s and 2 s).
                "replica.lag.time.max.ms=3000".to_owned(),
                "controller.quorum.fetch.timeout.ms=2000".to_owned(),
                "leader.imbalance.check.interval.seconds=1".to_owned(),
            ];
            all.extend(properties.iter().map(|p| p.replace("{port}", &nodes[n].0.to_string())));
            Arc::new(Kafka {
                folder: folder("kafka"),
                port: nodes[n].0,
                cluster: cluster.clone(),
                properties: all,
                environment: vec![
                    ("KAFKA_HEAP_OPTS", "-Xms64m -Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1"),
                    ("KAFKA_CLUSTER_ID", "AAAAAAAAAAAAAAAAAAAAAA"),
                ],
            })
        };
        let brokers: Vec<Arc<Self>> = (0..nodes.len()).map(broker).collect();
        // None of them serves before there is a quorum.
        std::thread::scope(|scope| {
            for broker in &brokers {
                scope.spawn(|| broker.start_again());
            }
        });
        brokers
    }

    pub fn start_again(&self) {
        let port = self.port.to_string();
        let mut arguments = vec!["start", self.folder.to_str().unwrap(), &port];
        arguments.extend(self.properties.iter().map(String::as_str));
        must_in(&self.environment, "kafka.sh", &arguments);
    }

    /// `signal`: TERM or KILL.
    pub fn stop(&self, signal: &str) {
        must("kafka.sh", &["stop", self.folder.to_str().unwrap(), signal]);
    }

    /// `STOP` freezes it, `CONT` wakes it up.
    pub fn signal(&self, signal: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
    }

    /// Whether its process has ended.
    pub fn is_gone(&self) -> bool {
        std::fs::read_to_string(format!("/proc/{}/stat", self.pid()))
            .map_or(true, |stat| stat.rsplit(')').next().is_some_and(|rest| rest.trim().starts_with('Z')))
    }

    /// What clients are given: every broker of the cluster.
    pub fn brokers(&self) -> String {
        self.cluster.clone()
    }

    pub fn pid(&self) -> i32 {
        std::fs::read_to_string(self.folder.join("kafka.pid")).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        script("kafka.sh", &["stop", self.folder.to_str().unwrap(), "KILL"]);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

type Shared<T> = LazyLock<Mutex<Option<Arc<T>>>>;

static POSTGRES: Shared<Postgres> = LazyLock::new(|| Mutex::new(None));
static KAFKA: Shared<Kafka> = LazyLock::new(|| Mutex::new(None));

/// The server of all tests that neither stop nor reconfigure one; a database for each test.
pub fn shared_postgres() -> Arc<Postgres> {
    let mut shared = POSTGRES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let server = shared.get_or_insert_with(|| {
        let settings = ["max_replication_slots=100", "max_wal_senders=100", "max_prepared_transactions=10"];
        Arc::new(Postgres::start(&settings))
    });
    Arc::clone(server)
}

/// The broker of all tests that do not stop one; a topic for each test.
pub fn shared_kafka() -> Arc<Kafka> {
    let mut shared = KAFKA.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    Arc::clone(shared.get_or_insert_with(|| Arc::new(kafka_with_proxies())))
}

/// The same, with a listener that is reached through a proxy of the test's own.
pub fn shared_kafka_through_a_proxy() -> (Arc<Kafka>, Proxy) {
    let kafka = shared_kafka();
    let proxy = PROXIES.lock().unwrap().pop().expect("more of LISTENERS_BEHIND_PROXIES");
    (kafka, proxy)
}

/// One for each test that needs one: clients go where a listener says that it is.
const LISTENERS_BEHIND_PROXIES: usize = 10;
static PROXIES: Mutex<Vec<Proxy>> = Mutex::new(Vec::new());

fn kafka_with_proxies() -> Kafka {
    let mut properties = [
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT".to_owned(),
        "listeners=PLAINTEXT://127.0.0.1:{port}".to_owned(),
        "advertised.listeners=PLAINTEXT://127.0.0.1:{port}".to_owned(),
    ];
    let mut threads = Vec::new();
    for n in 0..LISTENERS_BEHIND_PROXIES {
        let (listener, proxy) = (free_port(), free_port());
        properties[0].push_str(&format!(",WIRE{n}:PLAINTEXT"));
        properties[1].push_str(&format!(",WIRE{n}://127.0.0.1:{listener}"));
        properties[2].push_str(&format!(",WIRE{n}://127.0.0.1:{proxy}"));
        threads.push(format!("listener.name.wire{n}.num.network.threads=1"));
        PROXIES.lock().unwrap().push(Proxy::start_on(proxy, listener));
    }
    let all: Vec<&str> = properties.iter().chain(&threads).map(String::as_str).collect();
    Kafka::start(&all)
}

/// The brokers of the tests that need three.
pub type Cluster = Option<Vec<Arc<Kafka>>>;

static CLUSTER: Mutex<Cluster> = Mutex::new(None);

/// For one test at a time; one that has failed may have left it broken.
pub fn shared_cluster() -> (MutexGuard<'static, Cluster>, Vec<Arc<Kafka>>) {
    let mut shared = CLUSTER.lock().unwrap_or_else(|broken| {
        CLUSTER.clear_poison();
        let mut guard = broken.into_inner();
        *guard = None;
        guard
    });
    let brokers = shared.get_or_insert_with(|| Kafka::cluster(&[])).clone();
    (shared, brokers)
}

pub fn stop_shared() {
    drop(CLUSTER.lock().map(|mut shared| shared.take()));
    drop(POSTGRES.lock().map(|mut shared| shared.take()));
    drop(KAFKA.lock().map(|mut shared| shared.take()));
}
