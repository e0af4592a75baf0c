//! What the worker may do, and the secrets it does it with, change while it runs.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;

use crate::mistakes::{Authority, server_with_tls};
use crate::servers_fail::all_is_well;
use crate::support::bed::Bed;
use crate::support::servers::{self, Kafka};
use crate::tests;

tests![
    a_right_to_the_topic_that_is_taken_away_is_waited_for,
    a_rotated_certificate_and_password_are_read_at_the_next_connection,
];

/// A length and the bytes, as Kafka's protocol has strings.
fn string(text: &str) -> Vec<u8> {
    [&i16::try_from(text.len()).unwrap().to_be_bytes()[..], text.as_bytes()].concat()
}

/// Denies everybody named so everything with the topic, or takes that back: CreateAcls and DeleteAcls,
/// version 1 (librdkafka has both, its Rust binding neither).
fn deny(bed: &Bed, user: &str, denied: bool) {
    const CREATE_ACLS: i16 = 30;
    const DELETE_ACLS: i16 = 31;
    let (topic, literal, all, deny) = (2, 3, 2, 2);
    let principal = string(&format!("User:{user}"));
    let key = if denied { CREATE_ACLS } else { DELETE_ACLS };
    let mut request = [key, 1].map(i16::to_be_bytes).concat();
    request.extend(0i32.to_be_bytes()); // correlation id
    request.extend(string("test"));
    request.extend(1i32.to_be_bytes()); // entries
    request.push(topic);
    request.extend(string(&bed.topic.name));
    request.push(literal);
    request.extend(principal);
    request.extend(string("*"));
    request.extend([all, deny]);
    let mut broker = TcpStream::connect(("127.0.0.1", bed.kafka.port)).unwrap();
    broker.write_all(&i32::try_from(request.len()).unwrap().to_be_bytes()).unwrap();
    broker.write_all(&request).unwrap();
    // Length, correlation id, throttle time, entries, error.
    let mut answer = [0; 18];
    broker.read_exact(&mut answer).unwrap();
    assert_eq!(answer[16..], [0, 0], "{answer:?}");
}

fn a_right_to_the_topic_that_is_taken_away_is_waited_for() {
    let port = servers::free_port();
    let jaas = "org.apache.kafka.common.security.plain.PlainLoginModule required user_tailer=\"S3cr3t\";";
    let kafka = Kafka::start(&[
        &format!("listeners=PLAINTEXT://127.0.0.1:{{port}},SASL_PLAINTEXT://127.0.0.1:{port}"),
        "sasl.enabled.mechanisms=PLAIN",
        &format!("listener.name.sasl_plaintext.plain.sasl.jaas.config={jaas}"),
        "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users=User:ANONYMOUS",
        "allow.everyone.if.no.acl.found=true",
    ]);
    let mut bed = Bed::on(servers::shared_postgres(), Arc::new(kafka));
    bed.init();
    bed.settings.kafka = "sasl_password = 'S3cr3t'".to_owned();
    bed.settings.properties =
        "'security.protocol' = 'SASL_PLAINTEXT'\n'sasl.mechanism' = 'PLAIN'\n'sasl.username' = 'tailer'"
            .to_owned();
    bed.brokers = format!("127.0.0.1:{port}");
    bed.write_config();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    bed.confirmed();
    deny(&bed, "tailer", true);
    bed.insert(1, 10);
    let said = worker.says("does not let this user see topic");
    assert_eq!(said["ready"], false);
    let end = bed.committed().events.last().unwrap().end_lsn;
    assert!(bed.topic.count() == 10 && bed.positions().1 < end);
    deny(&bed, "tailer", false);
    worker.streams_again(2);
    assert_eq!(all_is_well(&mut bed), 0);
    worker.stop();
}

fn a_rotated_certificate_and_password_are_read_at_the_next_connection() {
    let folder = servers::folder("certificates");
    let (old, new) = (Authority::new(&folder, "old"), Authority::new(&folder, "new"));
    let mut bed = Bed::on(Arc::new(server_with_tls(&old)), servers::shared_kafka());
    let (port, database) = (bed.postgres.port, bed.database.clone());
    let (trusted, password) = (folder.join("trusted.crt"), folder.join("password"));
    std::fs::copy(&old.file, &trusted).unwrap();
    std::fs::write(&password, "before").unwrap();
    let user = format!("app_{database}");
    bed.sql(&format!("CREATE ROLE {user} LOGIN SUPERUSER REPLICATION PASSWORD 'before'"));
    bed.settings.url = format!("postgres://{user}@localhost:{port}/{database}");
    bed.settings.postgres = format!(
        "tls_mode = 'verify-full'\ntls_ca_file = '{}'\npassword_file = '{}'",
        trusted.display(),
        password.display()
    );
    bed.write_config();
    bed.init();
    let mut worker = bed.streaming();
    bed.insert(1, 10);
    bed.arrived();
    // The server first: the worker waits until it is told, too.
    let (certificate, key) = new.certify("localhost");
    std::fs::write(bed.postgres.data.join("server.crt"), certificate).unwrap();
    std::fs::write(bed.postgres.data.join("server.key"), key).unwrap();
    bed.sql(&format!("ALTER ROLE {user} PASSWORD 'after'"));
    bed.sql("SELECT pg_reload_conf()");
    bed.terminate("walsender");
    assert_eq!(worker.says("TLS")["ready"], false);
    std::fs::copy(&new.file, &trusted).unwrap();
    assert_eq!(worker.says("password authentication failed")["ready"], false);
    std::fs::write(&password, "after").unwrap();
    worker.streams_again(2);
    bed.insert(1, 10);
    all_is_well(&mut bed);
    assert!(!format!("{:?}", worker.log()).contains("after\""), "a secret was printed");
    worker.stop();
}
