//! The stream in normal life: the promise watched from outside, the ways in (hosts, sockets, TLS to
//! Kafka), and the demo.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::support::bed::{Bed, Load};
use crate::support::servers::{self, Kafka, Postgres, ROOT};
use crate::support::{eventually, within};
use crate::tests;

tests![
    a_steady_stream_keeps_every_promise,
    the_primary_is_found_among_dead_hosts_and_standbys,
    a_unix_socket_works_for_both_sessions,
    kafka_is_reached_over_tls_with_a_password,
    a_frozen_walsender_is_given_up_and_the_stream_goes_on_when_it_wakes,
    the_demo_ends_by_itself_and_counts,
    the_demo_without_kafka_uses_the_mock_broker_and_says_so,
    the_demo_stops_at_ctrl_c_and_leaves_nothing_running,
];

fn a_steady_stream_keeps_every_promise() {
    let mut bed = Bed::new();
    bed.init();
    let mut worker = bed.streaming();
    let load = Load::start(&bed, 4, Duration::from_millis(2));
    eventually("a thousand events are committed", || {
        (bed.value::<i64>("SELECT count(*) FROM outbox_event") > 1000).then_some(())
    });
    load.stop();
    let (_, verdict) = bed.arrived();
    assert_eq!(verdict.repeats, 0);
    bed.confirmed();
    worker.stop();
}

fn the_primary_is_found_among_dead_hosts_and_standbys() {
    let primary = Arc::new(Postgres::start(&[]));
    let standby = Postgres::standby_of(&primary, &[]);
    let mut bed = Bed::on(primary, servers::shared_kafka());
    bed.init();
    let dead = servers::free_port();
    bed.settings.url = format!(
        "postgres://postgres@127.0.0.1:{dead},127.0.0.1:{},127.0.0.1:{}/{}",
        standby.port, bed.postgres.port, bed.database
    );
    bed.write_config();
    let mut worker = bed.streaming();
    bed.insert(1, 3);
    bed.arrived();
    worker.stop();
    // With the standby alone there is nothing to stream from, and the worker says so.
    bed.settings.url = format!("postgres://postgres@127.0.0.1:{}/{}", standby.port, bed.database);
    bed.write_config();
    bed.start().says("is in recovery (a standby)");
}

fn a_unix_socket_works_for_both_sessions() {
    let mut bed = Bed::new();
    bed.init();
    let directory = bed.value::<String>("SELECT trim(current_setting('unix_socket_directories'), '\"')");
    let port = bed.postgres.port;
    bed.settings.url = format!("host={directory} port={port} user=postgres dbname={}", bed.database);
    bed.write_config();
    let mut worker = bed.streaming();
    bed.insert(1, 100);
    bed.arrived();
    let unix =
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-tailer' AND client_port = -1
                AND datname = current_database()";
    assert_eq!(bed.value::<i64>(unix), 2);
    worker.stop();
}

fn kafka_is_reached_over_tls_with_a_password() {
    let folder = servers::folder("certificates");
    let script = "openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=ca -keyout ca.key -out ca.pem &&
        openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout broker.key -out broker.csr &&
        printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' > san &&
        openssl x509 -req -in broker.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -extfile san -out broker.pem &&
        openssl pkcs12 -export -in broker.pem -inkey broker.key -certfile ca.pem -passout pass:changeit -out broker.p12";
    let made = Command::new("sh").args(["-c", script]).current_dir(&folder).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let port = servers::free_port();
    let jaas = "org.apache.kafka.common.security.plain.PlainLoginModule required user_tailer=\"S3cr3t\";";
    let kafka = Kafka::start(&[
        &format!("listeners=PLAINTEXT://127.0.0.1:{{port}},SASL_SSL://127.0.0.1:{port}"),
        "sasl.enabled.mechanisms=PLAIN",
        &format!("listener.name.sasl_ssl.plain.sasl.jaas.config={jaas}"),
        "ssl.keystore.type=PKCS12",
        &format!("ssl.keystore.location={}", folder.join("broker.p12").display()),
        "ssl.keystore.password=changeit",
    ]);
    let mut bed = Bed::on(servers::shared_postgres(), Arc::new(kafka));
    bed.init();
    let ca = folder.join("ca.pem");
    std::fs::write(folder.join("password"), "S3cr3t\n").unwrap();
    bed.settings.kafka = format!("sasl_password_file = {:?}", folder.join("password"));
    bed.settings.properties = format!(
        "'security.protocol' = 'SASL_SSL'\n'sasl.mechanism' = 'PLAIN'\n'sasl.username' = 'tailer'\n'ssl.ca.location' = {ca:?}\n'compression.type' = 'zstd'"
    );
    bed.brokers = format!("localhost:{port}");
    bed.write_config();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    worker.stop();

    // A rotated password is read anew; a wrong one is waited out, and never printed.
    std::fs::write(folder.join("password"), "wr0ng\n").unwrap();
    let mut worker = bed.start();
    let line = worker.says("waiting: ");
    assert!(
        line["message"].as_str().unwrap().to_lowercase().contains("authentication"),
        "{:#?}",
        worker.log()
    );
    std::fs::write(folder.join("password"), "S3cr3t\n").unwrap();
    worker.streams();
    let printed = format!("{:?}", worker.log());
    assert!(!printed.contains("wr0ng") && !printed.contains("S3cr3t"), "a secret was printed");
}

fn a_frozen_walsender_is_given_up_and_the_stream_goes_on_when_it_wakes() {
    // The server's own time-out is the least that silence is borne.
    let server = Postgres::start(&["wal_sender_timeout=3s"]);
    let mut bed = Bed::on(Arc::new(server), servers::shared_kafka());
    bed.init();
    bed.settings.postgres = "silence_timeout_ms = 2000".to_owned();
    bed.write_config();
    let mut worker = bed.streaming();
    bed.insert(1, 3);
    bed.arrived();
    let walsender = bed.value::<i32>(&format!(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{}'",
        bed.slot
    ));
    signal(walsender, "STOP");
    bed.insert(1, 3);
    worker.says("PostgreSQL has said nothing for");
    worker.says(&format!("in use by another worker (active for PID {walsender})"));
    signal(walsender, "CONT");
    worker.streams_again(2);
    bed.arrived();
    worker.stop();
}

fn signal(pid: i32, name: &str) {
    assert!(Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap().success());
}

/// `make demo` as the README has it, but with the program that is being tested.
fn demo(variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new("make");
    command.args(["-s", "demo"]).current_dir(ROOT).stdin(Stdio::null());
    command.env("DEMO_PROGRAM", env!("CARGO_BIN_EXE_outbox-tailer"));
    command.env_remove("MAKEFLAGS").env_remove("DATABASE_URL").env_remove("KAFKA_BROKERS");
    command.args(variables.iter().map(|(name, value)| format!("{name}={value}")));
    command
}

/// The last line, as `name=value` pairs.
fn summary(output: &str) -> Vec<(&str, u64)> {
    let line = output
        .lines()
        .rfind(|l| l.starts_with("events="))
        .unwrap_or_else(|| panic!("no summary in: {output}"));
    let pair =
        |pair: &'_ str| pair.split_once('=').map(|(name, value)| (name.to_owned(), value.parse().unwrap()));
    line.split(' ')
        .map(|text| {
            let (name, value) = pair(text).unwrap();
            (
                ["events", "published", "lost", "inverted", "repeats"]
                    .into_iter()
                    .find(|n| *n == name)
                    .unwrap(),
                value,
            )
        })
        .collect()
}

fn the_demo_ends_by_itself_and_counts() {
    let output = demo(&[("EVENTS", "2000"), ("RATE", "0")]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let summary = summary(&text);
    assert_eq!(summary[..4], [("events", 2000), ("published", 2000), ("lost", 0), ("inverted", 0)]);
    assert!(text.contains("broker: Kafka at") && text.contains("slot lag"), "{text}");
}

fn the_demo_without_kafka_uses_the_mock_broker_and_says_so() {
    let bed = servers::shared_postgres();
    let output = Command::new(env!("CARGO_BIN_EXE_outbox-tailer"))
        .args(["--database-url", &bed.url("postgres"), "demo", "--events", "300", "--rate", "0"])
        .env_clear()
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("mock broker"), "{text}");
    assert_eq!(summary(&text)[..4], [("events", 300), ("published", 300), ("lost", 0), ("inverted", 0)]);
    let left = "SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%demo%'";
    assert_eq!(bed.connect("postgres").query_one(left, &[]).unwrap().get::<_, i64>(0), 0);
}

fn the_demo_stops_at_ctrl_c_and_leaves_nothing_running() {
    // A group of its own, as a terminal gives it, so that the signal reaches all of it.
    let mut setsid = Command::new("setsid");
    let mut demo = demo(&[("RATE", "100")]);
    let work = servers::folder("demo").join("work");
    demo.env("DEMO_WORK", &work);
    setsid.arg(demo.get_program()).args(demo.get_args()).current_dir(ROOT).stdin(Stdio::null());
    for (name, value) in demo.get_envs() {
        match value {
            Some(value) => setsid.env(name, value),
            None => setsid.env_remove(name),
        };
    }
    let mut child = setsid.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let group = child.id();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let seen: Vec<String> = lines.by_ref().take_while(|line| !line.contains("OrderPaid")).collect();
    assert!(Command::new("kill").args(["-s", "INT", "--", &format!("-{group}")]).status().unwrap().success());
    let rest: Vec<String> = lines.collect();
    within(Duration::from_secs(60), "the demo ends", &mut || child.try_wait().unwrap());
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert!(rest.iter().any(|l| l.contains("lost=0 inverted=0")), "{seen:?}{rest:?}{errors}");
    // make may end a moment before what it has started.
    let left = || Command::new("pgrep").args(["-f", work.to_str().unwrap()]).output().unwrap().stdout;
    eventually("nothing of the demo runs any more", || left().is_empty().then_some(()));
}
