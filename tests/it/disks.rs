//! Disks are full, and have room again: small file systems in memory, which only root can mount.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::servers_fail::{all_is_well, flows};
use crate::support::bed::{Bed, EVENTS, Load, Rule};
use crate::support::eventually;
use crate::support::oracle;
use crate::support::servers::{self, Kafka, Postgres};
use crate::support::worker;
use crate::tests;

tests![
    a_full_disk_of_postgresql_is_waited_for,
    a_full_disk_of_kafka_is_waited_for,
    a_full_disk_of_the_witness_holds_up_the_confirmation_only,
    a_log_that_cannot_be_written_disturbs_nothing,
];

/// Why these tests cannot run here.
pub fn missing() -> Option<String> {
    Disk::new(1).is_none().then(|| "a tmpfs cannot be mounted here".to_owned())
}

struct Disk {
    path: PathBuf,
}

impl Disk {
    fn new(mib: u32) -> Option<Self> {
        let path = servers::folder("disk");
        let options = format!("size={mib}m,mode=777");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&path).output();
        mount.is_ok_and(|mount| mount.status.success()).then_some(Disk { path })
    }

    /// Until nothing more can be written.
    fn fill(&self) {
        let mut filler = File::options().create(true).append(true).open(self.path.join("filler")).unwrap();
        for size in [1 << 20, 4096, 1] {
            while filler.write_all(&vec![0; size]).is_ok() {}
        }
    }

    fn free(&self) {
        std::fs::remove_file(self.path.join("filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
        let _ = std::fs::remove_dir(&self.path);
    }
}

fn a_full_disk_of_postgresql_is_waited_for() {
    let disk = Disk::new(160).unwrap();
    let settings = ["max_wal_size=32MB", "min_wal_size=32MB"];
    let server = Postgres::stopped_in(disk.path.clone(), "18.6", &settings);
    server.start_again();
    let mut bed = Bed::on(Arc::new(server), servers::shared_kafka());
    bed.exempt(&[Rule::SlotForward], "a crash makes a slot forget what it had not saved yet");
    bed.init();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 2, Duration::from_millis(2));
    flows(&bed, 100);
    disk.fill();
    let mut writer = bed.connect();
    let grow = "CREATE TABLE IF NOT EXISTS noise (t text); INSERT INTO noise SELECT repeat('x', 900) FROM generate_series(1, 20000)";
    eventually("PostgreSQL cannot write", || writer.batch_execute(grow).is_err().then_some(()));
    load.stop();
    disk.free();
    // Without room for its WAL the server crashes, and may have given up.
    bed.postgres.stop("immediate");
    bed.postgres.start_again();
    bed.client = bed.connect();
    worker.streams_again(2);
    bed.insert(1, 10);
    all_is_well(&mut bed);
    assert!(worker.logged("refused: ").is_empty());
    worker.stop();
}

fn a_full_disk_of_kafka_is_waited_for() {
    let disk = Disk::new(64).unwrap();
    let kafka = Kafka::start(&[&format!("log.dirs={}/data", disk.path.display())]);
    let mut bed = Bed::on(servers::shared_postgres(), Arc::new(kafka));
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    let before = bed.positions();
    disk.fill();
    bed.insert_many(1, 10_000);
    // It has no other folder to go on with.
    eventually("the broker gives up", || bed.kafka.is_gone().then_some(()));
    let end = bed.committed().events.last().unwrap().end_lsn;
    assert!(bed.positions().1 < end && bed.positions() >= before);
    disk.free();
    bed.kafka.start_again();
    all_is_well(&mut bed);
    worker.stop();
}

fn a_full_disk_of_the_witness_holds_up_the_confirmation_only() {
    let disk = Disk::new(1).unwrap();
    let mut bed = Bed::new();
    bed.settings.witness = format!("kind = 'file'\nfile = '{}'", disk.path.join("witness.json").display());
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    disk.fill();
    bed.insert(1, 10);
    bed.arrived();
    let end = bed.committed().events.last().unwrap().end_lsn;
    let said = worker.says("witness.json cannot be written");
    assert_eq!(said["ready"], false);
    assert!(bed.positions().0 < end, "the slot was told before the witness");
    disk.free();
    all_is_well(&mut bed);
    worker.stop();
}

/// `/dev/full` is a disk that is always full.
fn a_log_that_cannot_be_written_disturbs_nothing() {
    let mut bed = Bed::new();
    bed.exempt(EVENTS, "judged here: no worker of the bed's own runs");
    bed.init();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let mut child = worker::program(&bed.config, &["run"]).stdout(full()).stderr(full()).spawn().unwrap();
    bed.insert(1, 10);
    let committed = bed.committed();
    oracle::check(&committed, &bed.topic.wait_for(committed.ids()));
    bed.confirmed();
    assert!(child.try_wait().unwrap().is_none(), "the worker has ended");
    let asked = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status().unwrap();
    assert!(asked.success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
