//! librdkafka's mock broker in a process of its own, and the worker with what that broker cannot do
//! switched off: this program, started again with another first argument.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use outbox_tailer::config::Overrides;
use outbox_tailer::{commands, config};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

use crate::arrivals::PARTITIONS;

/// Killed when dropped.
pub struct MockBroker {
    child: Child,
    pub brokers: String,
}

impl MockBroker {
    pub fn start(topic: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["mock-broker", topic])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut brokers = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut brokers).unwrap();
        MockBroker { child, brokers: brokers.trim().to_owned() }
    }

    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }
}

impl Drop for MockBroker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process of the broker: until its standard input ends.
pub fn serve(topic: &str) {
    let cluster: MockCluster<'static, DefaultProducerContext> = MockCluster::new(1).unwrap();
    cluster.create_topic(topic, PARTITIONS, 1).unwrap();
    println!("{}", cluster.bootstrap_servers());
    let _ = std::io::stdin().read(&mut [0]);
}

/// The process of the worker: until it is killed.
pub fn work(config_file: &Path) {
    let mut config = config::load(Some(config_file), std::iter::empty(), &Overrides::default()).unwrap();
    config.kafka.knows_limits = false;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    runtime.block_on(commands::run::run(&config, stopped)).unwrap();
}
