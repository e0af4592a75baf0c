//! A server with a backlog in its log, loaded once; every contender drains a copy of the same slot.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Instant;

use postgres::Client;
use postgres::types::PgLsn;

use crate::site::Veth;
use crate::support::servers::Postgres;
use crate::support::{bed, tally};

pub const PUBLICATION: &str = "outbox";
const DATABASE: &str = "bench";
/// The slot that is only ever copied.
const BASE: &str = "base";

#[derive(Debug, Clone, Copy)]
pub struct Workload {
    pub name: &'static str,
    pub says: &'static str,
    pub events: u64,
    pub transaction_events: u64,
    /// Of random text in the payload. 214 bytes make a row of 330 bytes in the stream.
    pub fill_bytes: usize,
}

impl Workload {
    /// Orders that are worked on in turn.
    pub fn keys(&self) -> u64 {
        self.events.clamp(1, 10_000)
    }
}

pub struct Backlog {
    pub server: Postgres,
    pub workload: Workload,
    pub socket: PathBuf,
    pub client: Client,
    /// Where the last commit ends.
    pub end: PgLsn,
    copies: u32,
}

/// No checkpoint and no vacuum may come in between.
const SETTINGS: [&str; 7] = [
    "shared_buffers=512MB",
    "max_wal_size=64GB",
    "checkpoint_timeout=1d",
    "autovacuum=off",
    "max_replication_slots=100",
    "max_wal_senders=100",
    "wal_sender_timeout=10min",
];

impl Backlog {
    /// A server with an empty outbox and the base slot.
    pub fn empty(server: Postgres, workload: Workload) -> Self {
        server.connect("postgres").batch_execute(&format!("CREATE DATABASE {DATABASE}")).unwrap();
        let mut client = server.connect(DATABASE);
        client.batch_execute(bed::OUTBOX).unwrap();
        let publish = format!(
            "CREATE PUBLICATION {PUBLICATION} FOR TABLE outbox_event WITH (publish = 'insert', publish_via_partition_root = true)"
        );
        client.batch_execute(&publish).unwrap();
        client
            .execute("SELECT pg_create_logical_replication_slot($1::text::name, 'pgoutput')", &[&BASE])
            .unwrap();
        let socket = "SELECT trim(current_setting('unix_socket_directories'), '\"')";
        let socket = client.query_one(socket, &[]).unwrap().get::<_, String>(0).into();
        Backlog { server, workload, socket, client, end: PgLsn::from(0), copies: 0 }
    }

    pub fn load(server: Postgres, workload: Workload) -> Self {
        let began = Instant::now();
        let mut backlog = Self::empty(server, workload);
        let Workload { events, transaction_events, fill_bytes, .. } = workload;
        let client = &mut backlog.client;
        client.batch_execute("SET synchronous_commit = off").unwrap();
        client
            .batch_execute(&format!(
                "DO $do$ DECLARE
                   keys bigint := {keys};
                   fill text := (SELECT left(string_agg(md5(g::text), ''), {fill_bytes}) FROM generate_series(0, {fill_bytes} / 32) g);
                 BEGIN
                   FOR i IN 0..{events} - 1 BY {transaction_events} LOOP
                     INSERT INTO outbox_event (event_id, order_id, revision, event_type, payload)
                     SELECT {numbered}, 'OrderPaid', jsonb_build_object('orderId', n % keys, 'note', fill)
                     FROM generate_series(i, least(i + {transaction_events}, {events}) - 1) n;
                     COMMIT;
                   END LOOP;
                 END $do$",
                keys = workload.keys(),
                numbered = tally::NUMBERED,
            ))
            .unwrap();
        backlog.end = client.query_one("SELECT pg_current_wal_insert_lsn()", &[]).unwrap().get(0);
        client.batch_execute("CHECKPOINT").unwrap();
        println!("loaded {events} events ({}) in {:.0} s", workload.says, began.elapsed().as_secs_f64());
        backlog
    }

    /// A slot of its own for one run, at the start of the backlog.
    pub fn copy_slot(&mut self) -> String {
        self.copies += 1;
        let slot = format!("run_{}", self.copies);
        let copy = "SELECT pg_copy_logical_replication_slot($1::text::name, $2::text::name)";
        self.client.execute(copy, &[&BASE, &slot]).unwrap();
        slot
    }

    pub fn drop_slot(&mut self, slot: &str) {
        let drop = "SELECT pg_drop_replication_slot($1::text::name)";
        crate::support::eventually("the slot is dropped", || self.client.execute(drop, &[&slot]).ok());
    }

    /// The walsender that serves the slot.
    pub fn walsender(&mut self, slot: &str) -> Option<i32> {
        let sql = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1";
        self.client.query_opt(sql, &[&slot]).unwrap()?.get(0)
    }

    pub fn confirmed(&mut self, slot: &str) -> PgLsn {
        let sql = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = $1";
        self.client.query_one(sql, &[&slot]).unwrap().get(0)
    }

    pub fn postmaster(&self) -> i32 {
        let file = std::fs::read_to_string(self.server.data.join("postmaster.pid")).unwrap();
        file.lines().next().unwrap().parse().unwrap()
    }

    pub fn database(&self) -> &'static str {
        DATABASE
    }
}

/// A server for a backlog, that the other namespace can reach, too.
pub fn server(veth: Option<&Veth>) -> Postgres {
    let Some(veth) = veth else { return Postgres::start(&SETTINGS) };
    let listen = format!("listen_addresses=127.0.0.1,{}", veth.address);
    let server = Postgres::stopped("18.6", &[&SETTINGS[..], &[&listen]].concat());
    append(&server, "pg_hba.conf", "host all,replication all samenet trust\n");
    server.start_again();
    server
}

/// The build that has TLS, and a certificate that nobody verifies.
pub fn tls_server() -> Postgres {
    let server = Postgres::stopped("18", &[&SETTINGS[..], &["ssl=on"]].concat());
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    append(&server, "server.crt", &made.cert.pem());
    append(&server, "server.key", &made.signing_key.serialize_pem());
    std::fs::set_permissions(server.data.join("server.key"), std::fs::Permissions::from_mode(0o600)).unwrap();
    server.start_again();
    server
}

fn append(server: &Postgres, file: &str, text: &str) {
    let mut file = OpenOptions::new().create(true).append(true).open(server.data.join(file)).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}
