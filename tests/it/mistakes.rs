//! Bad input gives one clear line, exit code 2, and changes nothing; what is not there yet is
//! waited for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use postgres::NoTls;

use crate::support::bed::{Bed, EVENTS, OUTBOX};
use crate::support::interceptor::Interceptor;
use crate::support::oracle::Topic;
use crate::support::servers::{self, Kafka, Postgres, shared_kafka};
use crate::support::worker::{Ended, run_in};
use crate::tests;

tests![
    a_server_without_logical_replication_is_named_with_every_setting_that_is_wrong,
    a_role_without_replication_is_named,
    a_role_without_the_workers_privileges_is_told_where_the_grants_are,
    a_missing_database_is_named,
    run_before_init_says_so,
    a_dropped_publication_is_a_refusal_even_at_the_first_start,
    bad_outbox_tables_are_named,
    bad_configuration_is_refused_before_any_connection,
    c11_a_bytea_payload_is_refused_by_name,
    c17_an_illegal_topic_is_refused_by_name,
    c21_slot_names_follow_the_servers_rule,
    c24_only_exact_names_are_used,
    c27_environment_file_and_flags_have_an_order,
    c28_no_secret_is_printed,
    c66_a_slot_of_another_kind_is_left_alone,
    c71_passwords_of_any_characters_log_in,
    c72_tls_modes_mean_what_they_mean_in_libpq,
    scram_is_bound_to_the_tls_channel,
    c75_a_missing_topic_is_waited_for,
    an_unreachable_server_is_waited_for,
    an_unreachable_broker_is_waited_for,
];

fn a_server_without_logical_replication_is_named_with_every_setting_that_is_wrong() {
    let server = Postgres::start(&["wal_level=replica", "max_wal_senders=0", "max_replication_slots=0"]);
    let mut bed = Bed::on(Arc::new(server), shared_kafka());
    bed.mistakes(
        &["init"],
        &[
            "wal_level is replica",
            "max_wal_senders is 0",
            "max_replication_slots is 0 and 0 are taken, 2 are needed",
            "ALTER SYSTEM",
        ],
    );
    // One after the other, as an operator would cure them.
    let cure = |bed: &mut Bed, setting: &str| {
        bed.sql(&format!("ALTER SYSTEM SET {setting}"));
        bed.postgres.stop("fast");
        bed.postgres.start_again();
        bed.client = bed.connect();
    };
    cure(&mut bed, "max_replication_slots = 5");
    let ended = bed.mistakes(&["init"], &["wal_level is replica", "max_wal_senders is 0"]);
    assert!(!ended.line().contains("max_replication_slots"), "{}", ended.line());
    cure(&mut bed, "max_wal_senders = 5");
    let ended = bed.mistakes(&["init"], &["wal_level is replica"]);
    assert!(!ended.line().contains("max_"), "{}", ended.line());
    cure(&mut bed, "wal_level = logical");
    cure(&mut bed, "max_replication_slots = 1");
    bed.mistakes(&["init"], &["max_replication_slots is 1 and 0 are taken, 2 are needed"]);
    cure(&mut bed, "max_replication_slots = 2");
    assert_eq!(bed.run(&["init"]).code, Some(0));
}

/// A role of the test's own, and the URL to connect with it.
fn role(bed: &mut Bed, attributes: &str) -> String {
    let name = format!("r_{}", bed.database);
    bed.sql(&format!("CREATE ROLE {name} LOGIN {attributes}"));
    bed.settings.url = bed.postgres.url(&bed.database).replace("postgres@", &format!("{name}@"));
    bed.write_config();
    name
}

fn a_role_without_replication_is_named() {
    let mut bed = Bed::new();
    role(&mut bed, "NOREPLICATION");
    bed.mistakes(&["init"], &["REPLICATION", "SQLSTATE 42501"]);
}

fn a_role_without_the_workers_privileges_is_told_where_the_grants_are() {
    let mut bed = Bed::new();
    bed.init();
    role(&mut bed, "REPLICATION");
    bed.mistakes(&["run"], &["permission denied for schema outbox_tailer", "Roles"]);
    let name = format!("r_{}", bed.database);
    bed.sql(&format!("GRANT USAGE ON SCHEMA outbox_tailer TO {name}; GRANT SELECT ON outbox_tailer.schema_version TO {name}"));
    bed.mistakes(&["run"], &["permission denied for table position", "Roles"]);
}

fn a_missing_database_is_named() {
    let mut bed = Bed::new();
    bed.settings.url = bed.postgres.url("no_such_database");
    bed.write_config();
    for command in ["init", "run"] {
        bed.mistakes(&[command], &["\"no_such_database\" does not exist"]);
    }
}

fn run_before_init_says_so() {
    let mut bed = Bed::new();
    bed.mistakes(&["run"], &["outbox_tailer", "outbox-tailer init"]);
    bed.init();
    // Another slot of the same database.
    bed.slot = format!("other_{}", bed.database);
    bed.write_config();
    let slot = bed.slot.clone();
    bed.mistakes(&["run"], &[&slot, "run `outbox-tailer init`"]);
    bed.mistakes(&["skip", "1"], &[&slot, "run `outbox-tailer init`"]);
}

fn a_dropped_publication_is_a_refusal_even_at_the_first_start() {
    let mut bed = Bed::new();
    bed.init();
    let publication = bed.publication.clone();
    bed.sql(&format!("DROP PUBLICATION {publication}"));
    let ended = bed.run(&["run", "--exit-on-refusal"]);
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    assert!(
        ended.stderr.contains(&format!("publication {publication} does not exist any more")),
        "{}",
        ended.stderr
    );
}

/// `[[outbox]]` for a table, with lines of TOML.
fn outbox(bed: &mut Bed, table: &str, lines: &str) {
    bed.settings.outbox = format!("[[outbox]]\ntable = '{table}'\ntopic = '{}'\n{lines}\n", bed.topic.name);
    bed.write_config();
}

fn bad_outbox_tables_are_named() {
    let mut bed = Bed::new();
    outbox(&mut bed, "public.outbox_events", "");
    bed.mistakes(&["init"], &["table public.outbox_events does not exist"]);
    outbox(&mut bed, "public.outbox_event", "key = 'orderid'");
    bed.mistakes(&["init"], &["table public.outbox_event has no column \"orderid\"", "order_id"]);
    outbox(&mut bed, "public.outbox_event", "headers = [{ name = 'x', column = ['a', 'b'] }]");
    bed.mistakes(&["init"], &["no column \"a\" or \"b\""]);
    bed.sql("CREATE VIEW outbox_view AS SELECT * FROM outbox_event");
    outbox(&mut bed, "public.outbox_view", "");
    bed.mistakes(&["init"], &["public.outbox_view"]);
    outbox(&mut bed, "public.outbox_event", "");
    bed.sql("CREATE TABLE outbox_child () INHERITS (outbox_event)");
    bed.mistakes(&["init"], &["public.outbox_event", "child tables (INHERITS)"]);
    bed.sql("DROP TABLE outbox_child; ALTER TABLE outbox_event ADD g text GENERATED ALWAYS AS ('x') STORED");
    outbox(&mut bed, "public.outbox_event", "headers = [{ name = 'g', column = 'g' }]");
    bed.mistakes(&["init"], &["no column \"g\" that can be streamed"]);
    bed.sql("ALTER TABLE outbox_event SET UNLOGGED");
    outbox(&mut bed, "public.outbox_event", "");
    bed.mistakes(&["init"], &["public.outbox_event", "logged"]);
}

fn bad_configuration_is_refused_before_any_connection() {
    let mut bed = Bed::new();
    let good = bed.settings.clone();
    let mut cases: Vec<(&str, &str, &[&str])> = vec![
        ("postgres", "publicaton = 'x'", &["publicaton", "did you mean `publication`"]),
        ("postgres", "tls_mode = 'verify_full'", &["verify_full", "verify-full"]),
        ("postgres", "connect_timeout_ms = 'soon'", &["postgres.connect_timeout_ms", "soon"]),
        ("worker", "window_bytes = -1", &["worker.window_bytes"]),
        ("postgres", "password = 1", &["postgres.password", "text in quotes"]),
        ("postgres", "tls_certificate_file = '/x'", &["tls_certificate_file", "tls_key_file"]),
        ("kafka", "broker = 'x'", &["broker", "did you mean `brokers`"]),
        ("properties", "acks = 1", &["acks is fixed"]),
        ("properties", "'enable.idempotence' = false", &["enable.idempotence is fixed"]),
        ("properties", "'max.in.flight' = 6", &["max.in.flight.requests.per.connection = 6", "1 to 5"]),
        ("worker", "window_events = 0", &["worker.window_events = 0", "at least 1"]),
        ("worker", "windowevents = 1", &["windowevents", "did you mean `window_events`"]),
        ("outbox", "[[outbox]]\ntable = 'a.b.c'", &["a.b.c", "schema.table"]),
        (
            "outbox",
            "[[outbox]]\ntable = 't'\n[[outbox]]\ntable = 'public.t'",
            &["public.t is configured twice"],
        ),
        ("outbox", "[[outbox]]\ntable = 't'\npreset = 'debezium'", &["table t", "topic is missing"]),
        (
            "outbox",
            "[[outbox]]\ntable = 't'\nheaders = [{ name = 'id', column = 'x' }]",
            &["header \"id\" is taken"],
        ),
    ];
    let urls = [
        "http://localhost/db",
        "postgres://u:p@localhost:port/db",
        "postgres://localhost/db",
        "user=u dbname=d",
    ];
    for url in urls {
        cases.push(("url", url, &["postgres.url"]));
    }
    cases.push((
        "url",
        "postgres://u@localhost/d?sslmode=verify_full",
        &["sslmode=verify_full", "verify-full"],
    ));
    for (place, line, says) in cases {
        let mut settings = good.clone();
        match place {
            "postgres" => settings.postgres = line.to_owned(),
            "kafka" => settings.kafka = line.to_owned(),
            "properties" => settings.properties = line.to_owned(),
            "worker" => settings.worker = line.to_owned(),
            "outbox" => settings.outbox = line.to_owned(),
            _ => settings.url = line.to_owned(),
        }
        bed.settings = settings;
        bed.write_config();
        bed.mistakes(&["init"], says);
    }
    bed.settings = good;
    bed.write_config();
    // A property that only librdkafka can judge, at the first connection to Kafka.
    bed.init();
    bed.settings.properties = "'no.such.property' = 1".to_owned();
    bed.write_config();
    bed.mistakes(&["run"], &["no.such.property"]);
    std::fs::write(&bed.config, "[postgres\nurl = 1").unwrap();
    let place = format!("{}, line 1", bed.config.display());
    bed.mistakes(&["init"], &[&place]);
    bed.config = PathBuf::from("/no/such/file.toml");
    bed.mistakes(&["init"], &["/no/such/file.toml"]);
}

fn c11_a_bytea_payload_is_refused_by_name() {
    let mut bed = Bed::new();
    bed.sql("CREATE DOMAIN avro AS bytea; ALTER TABLE outbox_event ADD body bytea, ADD document avro");
    for column in ["body", "document"] {
        outbox(&mut bed, "public.outbox_event", &format!("payload = '{column}'"));
        bed.mistakes(&["init"], &[&format!("column \"{column}\" of table public.outbox_event is bytea")]);
    }
}

fn c17_an_illegal_topic_is_refused_by_name() {
    let mut bed = Bed::new();
    let long = "t".repeat(250);
    for topic in ["bad topic", "a/b", "créé", "..", "", &long] {
        bed.settings.outbox = format!("[[outbox]]\ntable = 'outbox_event'\ntopic = '{topic}'\n");
        bed.write_config();
        bed.mistakes(&["init"], &[&format!("topic {topic:?} is not a Kafka topic name")]);
        bed.mistakes(&["run"], &["is not a Kafka topic name"]);
    }
}

fn c21_slot_names_follow_the_servers_rule() {
    let mut bed = Bed::new();
    let good = bed.slot.clone();
    let a64 = "a".repeat(64);
    let b64 = format!("{}b", "a".repeat(63));
    for slot in ["MySlot", "orders-cdc", &a64, &b64, ""] {
        bed.slot = slot.to_owned();
        bed.write_config();
        bed.mistakes(&["init"], &["postgres.slot", "1 to 63 characters out of a-z, 0-9 and _"]);
    }
    // As a flag, too.
    bed.slot = good;
    bed.write_config();
    bed.mistakes(&["--slot", "MySlot", "init"], &["MySlot", "1 to 63 characters"]);
    bed.slot = bed.database.replace(|c: char| !c.is_ascii_digit(), "");
    bed.write_config();
    bed.init();
    bed.insert(1, 1);
    let _worker = bed.streaming();
    bed.arrived();
}

fn c24_only_exact_names_are_used() {
    let tables = format!(
        "CREATE SCHEMA a_b; CREATE SCHEMA axb; {}; {}",
        OUTBOX.replace("outbox_event (", "a_b.outbox_event ("),
        OUTBOX.replace("outbox_event (", "axb.outbox_event (")
    );
    let mut bed = Bed::with(servers::shared_postgres(), shared_kafka(), &tables, &[]);
    let of_sibling = |bed: &mut Bed| {
        let slot = format!("{}x1yx", bed.database.replace('_', "z"));
        let state = "SELECT s.slot_name || ' ' || s.restart_lsn || ' ' || s.confirmed_flush_lsn || ' ' || p::text
                     FROM pg_replication_slots s JOIN outbox_tailer.position p ON p.slot = s.slot_name WHERE s.slot_name = $1";
        let state: String = bed.client.query_one(state, &[&slot]).unwrap().get(0);
        state
    };
    let database = bed.database.clone();
    bed.slot = format!("{}x1yx", database.replace('_', "z"));
    bed.publication = "pxub".to_owned();
    outbox(&mut bed, "axb.outbox_event", "");
    bed.init();
    let before = of_sibling(&mut bed);

    bed.exempt(EVENTS, "the test's own slot watches the sibling");
    // Under LIKE, these names match the sibling's.
    bed.slot = format!("{database}_1_x");
    bed.publication = "p_ub".to_owned();
    outbox(&mut bed, "a_b.outbox_event", "");
    let made = bed.run(&["init"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let mut worker = bed.streaming();
    let insert = |schema: &str, key: i64| {
        format!(
            "INSERT INTO {schema}.outbox_event (order_id, revision, event_type, payload) VALUES ({key}, 1, 'x', '{{}}')"
        )
    };
    bed.sql(&insert("axb", 1));
    bed.sql(&insert("a_b", 2));
    let messages = bed.topic.wait_for_count(1);
    assert_eq!(messages.iter().map(|m| m.key()).collect::<Vec<_>>(), ["2"]);
    worker.stop();
    bed.run(&["skip", "none"]);
    let again = bed.run(&["init", "--start-over", "--from-now"]);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert_eq!(of_sibling(&mut bed), before);
}

fn c27_environment_file_and_flags_have_an_order() {
    let mut bed = Bed::new();
    let (url, slot, publication) = (bed.settings.url.clone(), bed.slot.clone(), bed.publication.clone());
    let config = bed.config.to_str().unwrap().to_owned();
    let outbox = format!("[{{ table = 'outbox_event', topic = '{}' }}]", bed.topic.name);
    let brokers = bed.kafka.brokers();
    let all = [
        ("OUTBOX_TAILER_POSTGRES_URL", url.as_str()),
        ("OUTBOX_TAILER_POSTGRES_SLOT", &slot),
        ("OUTBOX_TAILER_POSTGRES_PUBLICATION", &publication),
        ("OUTBOX_TAILER_KAFKA_BROKERS", &brokers),
        ("OUTBOX_TAILER_OUTBOX", &outbox),
        ("OUTBOX_TAILER_WORKER_WINDOW_EVENTS", "100"),
    ];
    let works = |ended: Ended| assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    // (a) Everything from the environment.
    works(run_in(&all, &["init"]));
    // (b) The environment wins over the file, a flag over both.
    bed.settings.url = "postgres://nobody@127.0.0.1:1/nowhere".to_owned();
    bed.write_config();
    works(run_in(&[("OUTBOX_TAILER_CONFIG", &config), all[0]], &["init"]));
    works(run_in(
        &[
            ("OUTBOX_TAILER_CONFIG", &config),
            ("OUTBOX_TAILER_POSTGRES_URL", "postgres://nobody@127.0.0.1:1/nowhere"),
        ],
        &["--database-url", &url, "init"],
    ));
    // (c) The variables of libpq are those of another program.
    let foreign = [
        ("PGHOST", "10.9.9.9"),
        ("PGSSLMODE", "verify-full"),
        ("PGUSER", "x"),
        ("PGDATABASE", "y"),
        ("PGOPTIONS", "-c x"),
    ];
    works(run_in(&[&all[..], &foreign].concat(), &["init"]));
    // (d) An unknown name is a mistake here, too.
    let ended = run_in(&[&all[..], &[("OUTBOX_TAILER_POSTGRES_PUBLICATON", "x")]].concat(), &["init"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.line().contains("did you mean `OUTBOX_TAILER_POSTGRES_PUBLICATION`"), "{}", ended.line());
}

/// A server on which every role but `postgres` needs its password (SCRAM).
pub fn server_with_passwords(version: &str, settings: &[&str]) -> Postgres {
    let server = Postgres::stopped(version, settings);
    let rules = "local all all trust\nhost all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n";
    std::fs::write(server.data.join("pg_hba.conf"), rules).unwrap();
    server
}

/// What any URL or file may hold, and shells, SQL and URLs take apart.
const PASSWORD: &str = "p@s:s/w#o%r$d{ü}'\"\\ x";

fn percent_encoded(text: &str) -> String {
    text.bytes().map(|b| format!("%{b:02X}")).collect()
}

fn owner_with_password(bed: &mut Bed, password: &str) -> String {
    let name = format!("app_{}", bed.database);
    let create =
        "SELECT format('CREATE ROLE %I LOGIN SUPERUSER REPLICATION PASSWORD %L', $1::text, $2::text)";
    let create: String = bed.client.query_one(create, &[&name, &password]).unwrap().get(0);
    bed.sql(&create);
    name
}

fn c71_passwords_of_any_characters_log_in() {
    let server = server_with_passwords("18.6", &[]);
    server.start_again();
    let mut bed = Bed::on(Arc::new(server), shared_kafka());
    let user = owner_with_password(&mut bed, PASSWORD);
    let (port, database) = (bed.postgres.port, bed.database.clone());
    let file = bed.config.with_file_name("password");
    std::fs::write(&file, format!("{PASSWORD}\n")).unwrap();
    let plain = format!("postgres://{user}@127.0.0.1:{port}/{database}");
    let escaped = PASSWORD.replace('\\', "\\\\").replace('\'', "\\'");
    let ways = [
        (
            format!("postgres://{user}:{}@127.0.0.1:{port}/{database}", percent_encoded(PASSWORD)),
            String::new(),
        ),
        (plain.clone(), format!("password_file = '{}'", file.display())),
        (plain.clone(), format!("password = {PASSWORD:?}")),
        (
            format!("host=127.0.0.1 port={port} user={user} dbname='{database}' password = '{escaped}'"),
            String::new(),
        ),
    ];
    for (url, settings) in &ways {
        bed.settings.url.clone_from(url);
        bed.settings.postgres.clone_from(settings);
        bed.write_config();
        let ended = bed.run(&["init"]);
        assert_eq!(ended.code, Some(0), "{settings}: {}", ended.stderr);
        // Both connections: the stream is the replication one, the position moves on the other.
        let mut worker = bed.streaming();
        bed.insert(1, 1);
        bed.topic.wait_for_count(1);
        worker.stop();
    }
    // From the environment, literally.
    let literal = "a$HOME$b";
    bed.sql(&format!("ALTER ROLE {user} PASSWORD '{literal}'"));
    bed.settings.url = plain;
    bed.settings.postgres.clear();
    bed.write_config();
    let config = bed.config.to_str().unwrap().to_owned();
    let ended = run_in(
        &[("HOME", "/root"), ("OUTBOX_TAILER_CONFIG", &config), ("OUTBOX_TAILER_POSTGRES_PASSWORD", literal)],
        &["init"],
    );
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);

    // And the wrong ones do not.
    bed.mistakes(&["init"], &["password", "127.0.0.1"]);
    for (settings, says) in
        [("password = 'wrong'", "password authentication failed"), ("password_file = '/no/file'", "/no/file")]
    {
        bed.settings.postgres = settings.to_owned();
        bed.write_config();
        bed.mistakes(&["init"], &[says]);
        bed.mistakes(&["run"], &[says]);
    }
}

fn c28_no_secret_is_printed() {
    const SECRETS: [&str; 2] = ["S3cr3t%40x", "S3cr3t@x"];
    let server = server_with_passwords("18.6", &[]);
    server.start_again();
    let mut bed = Bed::on(Arc::new(server), shared_kafka());
    let user = owner_with_password(&mut bed, SECRETS[1]);
    let url =
        |port: u16, database: &str| format!("postgres://{user}:{}@127.0.0.1:{port}/{database}", SECRETS[0]);
    let good = url(bed.postgres.port, &bed.database);
    let hides = |what: &str, printed: &str| {
        assert!(!SECRETS.iter().any(|secret| printed.contains(secret)), "{what}: {printed}");
    };
    let runs = |bed: &mut Bed, what: &str, code: i32, arguments: &[&str]| {
        bed.write_config();
        for log in ["info", "trace"] {
            let ended = bed.run(&[&["--log", log], arguments].concat());
            assert_eq!(ended.code, Some(code), "{what}: {ended:#?}");
            hides(what, &ended.stderr);
            hides(what, &ended.stdout);
        }
    };
    bed.settings.url = url(1, "nowhere");
    runs(&mut bed, "a wrong port", 4, &["init"]);
    bed.settings.url = format!("postgres://u:{}@127.0.0.1:port/x", SECRETS[0]);
    runs(&mut bed, "a bad URL", 2, &["init"]);
    bed.settings.url = format!("host=127.0.0.1 user=u password='{} dbname=x", SECRETS[1]);
    runs(&mut bed, "an open quote", 2, &["init"]);
    bed.settings.url = url(bed.postgres.port, "no_such_database");
    runs(&mut bed, "a missing database", 2, &["init"]);
    bed.settings.url.clone_from(&good);
    bed.settings.postgres = format!("pasword = '{}'", SECRETS[1]);
    runs(&mut bed, "a misspelt key", 2, &["init"]);
    bed.settings.postgres = format!("password = ['{}']", SECRETS[1]);
    runs(&mut bed, "a password of another type", 2, &["init"]);
    bed.settings.postgres = "password = 2718281828".to_owned();
    bed.write_config();
    assert!(!bed.mistakes(&["init"], &["password"]).line().contains("2718281828"));
    bed.settings.postgres = format!("password = '{}", SECRETS[1]);
    runs(&mut bed, "a password whose quote is open", 2, &["init"]);
    bed.settings.postgres.clear();
    bed.settings.properties = format!("'sasl.password' = '{}'", SECRETS[1]);
    runs(&mut bed, "a SASL password among the properties", 2, &["init"]);
    bed.settings.properties.clear();
    bed.sql(&format!("ALTER ROLE {user} PASSWORD 'another'"));
    runs(&mut bed, "a wrong password", 2, &["run"]);
    bed.sql(&format!("ALTER ROLE {user} PASSWORD '{}'", SECRETS[1]));
    runs(&mut bed, "help", 0, &["--help"]);
    runs(&mut bed, "a dry run", 0, &["init", "--dry-run"]);
    runs(&mut bed, "init", 0, &["init"]);

    // A worker that streams, and one that SASL keeps out.
    let mut worker = bed.start_with(&["--log", "trace"]);
    worker.streams();
    bed.insert(1, 1);
    bed.topic.wait_for_count(1);
    worker.stop();
    hides("a worker", &format!("{:?}", worker.log()));
    bed.settings.kafka = format!("sasl_password = '{}'", SECRETS[1]);
    bed.settings.properties = "'security.protocol' = 'SASL_PLAINTEXT'\n'sasl.mechanisms' = 'PLAIN'\n'sasl.username' = 'u'\ndebug = 'security,broker'".to_owned();
    bed.write_config();
    let mut worker = bed.start_with(&["--log", "trace"]);
    worker.says("waiting: no answer from Kafka");
    worker.stop();
    hides("a worker without access to Kafka", &format!("{:?}", worker.log()));
}

fn c66_a_slot_of_another_kind_is_left_alone() {
    let mut bed = Bed::new();
    let (slot, database) = (bed.slot.clone(), bed.database.clone());
    let refuses = |bed: &mut Bed, says: &str| {
        for arguments in [&["init"][..], &["init", "--adopt-slot", &slot], &["init", "--start-over"]] {
            bed.mistakes(arguments, &[&format!("slot {slot}"), says]);
        }
        bed.mistakes(&["run"], &["init"]);
    };
    let drop_slot = |bed: &mut Bed| bed.sql(&format!("SELECT pg_drop_replication_slot('{slot}')"));

    bed.sql(&format!("SELECT pg_create_physical_replication_slot('{slot}')"));
    refuses(&mut bed, "physical");
    drop_slot(&mut bed);
    bed.sql(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'test_decoding')"));
    refuses(&mut bed, "test_decoding");
    drop_slot(&mut bed);
    bed.sql(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', false, true)"));
    refuses(&mut bed, "two_phase");
    drop_slot(&mut bed);
    let mut other = bed.connect();
    other
        .batch_execute(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', true)"))
        .unwrap();
    refuses(&mut bed, "temporary");
    drop(other);
    crate::support::eventually("the temporary slot is gone", || {
        bed.value::<bool>(&format!(
            "SELECT NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{slot}')"
        ))
        .then_some(())
    });
    let other = Bed::new();
    other
        .connect()
        .batch_execute(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"))
        .unwrap();
    refuses(&mut bed, &format!("belongs to database {}, not {database}", other.database));
    drop(other); // and its slots with it

    // After `init`, somebody puts another slot in the place of ours.
    bed.init();
    drop_slot(&mut bed);
    bed.sql(&format!("SELECT pg_create_physical_replication_slot('{slot}')"));
    let ended = bed.run(&["run", "--exit-on-refusal"]);
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    assert!(ended.stderr.contains(&format!("slot {slot} is a physical slot")), "{}", ended.stderr);
    drop_slot(&mut bed);
}

/// A certificate authority and what it signs, as PEM files.
pub struct Authority {
    pub file: PathBuf,
    issuer: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

impl Authority {
    pub fn new(folder: &Path, name: &str) -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let issuer =
            rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap();
        let file = folder.join(format!("{name}.crt"));
        std::fs::write(&file, issuer.pem()).unwrap();
        Authority { file, issuer }
    }

    /// Certificate and key for a host name.
    pub fn certify(&self, host: &str) -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec![host.to_owned()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

/// A server with TLS and passwords, whose certificate is for `localhost`.
pub fn server_with_tls(authority: &Authority) -> Postgres {
    use std::os::unix::fs::PermissionsExt as _;
    let server = server_with_passwords("17", &["ssl=on"]);
    let (certificate, key) = authority.certify("localhost");
    for (name, text) in [("server.crt", certificate), ("server.key", key)] {
        let path = server.data.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    server.start_again();
    server
}

fn c72_tls_modes_mean_what_they_mean_in_libpq() {
    let folder = servers::folder("certificates");
    let (right, wrong) = (Authority::new(&folder, "right"), Authority::new(&folder, "wrong"));
    let mut bed = Bed::on(Arc::new(server_with_tls(&right)), shared_kafka());
    let user = owner_with_password(&mut bed, PASSWORD);
    let (port, database) = (bed.postgres.port, bed.database.clone());
    let set = |bed: &mut Bed, mode: &str, ca: Option<&Authority>, host: &str| {
        bed.settings.url =
            format!("postgres://{user}:{}@{host}:{port}/{database}", percent_encoded(PASSWORD));
        let ca = ca.map_or(String::new(), |ca| format!("tls_ca_file = '{}'", ca.file.display()));
        bed.settings.postgres = format!("tls_mode = '{mode}'\n{ca}");
        bed.write_config();
    };
    let (right, wrong) = (Some(&right), Some(&wrong));
    let cases = [
        // mode, authority, host, whether it connects
        ("disable", None, "localhost", true),
        ("disable", wrong, "127.0.0.1", true),
        ("prefer", None, "localhost", true),
        ("prefer", wrong, "127.0.0.1", true),
        ("require", None, "127.0.0.1", true),
        ("require", right, "127.0.0.1", true),
        ("require", wrong, "127.0.0.1", false), // libpq: with a CA file it is verify-ca
        ("verify-ca", right, "127.0.0.1", true),
        ("verify-ca", wrong, "localhost", false),
        ("verify-ca", None, "localhost", false), // the system's authorities do not know ours
        ("verify-full", right, "localhost", true),
        ("verify-full", right, "127.0.0.1", false),
        ("verify-full", wrong, "localhost", false),
        ("verify-full", None, "localhost", false),
    ];
    for (mode, ca, host, connects) in cases {
        set(&mut bed, mode, ca, host);
        if connects {
            let ended = bed.run(&["init"]);
            assert_eq!(ended.code, Some(0), "{mode} {host}: {ended:#?}");
        } else {
            bed.mistakes(&["init"], &[host, "certificate"]);
        }
    }
    // Both sessions of a running worker obey the same setting.
    for (mode, ca, encrypted) in [
        ("disable", None, false),
        ("prefer", None, true),
        ("require", None, true),
        ("verify-full", right, true),
    ] {
        set(&mut bed, mode, ca, "localhost");
        let mut worker = bed.streaming();
        let sql = format!(
            "SELECT a.backend_type || ' ' || s.ssl FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.usename = '{user}' ORDER BY 1"
        );
        let sessions: Vec<String> = bed.client.query(&sql, &[]).unwrap().iter().map(|r| r.get(0)).collect();
        assert_eq!(
            sessions,
            [format!("client backend {encrypted}"), format!("walsender {encrypted}")],
            "{mode}"
        );
        worker.stop();
    }
    // The parameters of a URL copied from psql.
    set(&mut bed, "verify-full", None, "localhost");
    bed.settings.postgres.clear();
    bed.settings.url.push_str(&format!("?sslmode=verify-full&sslrootcert={}", right.unwrap().file.display()));
    bed.write_config();
    assert_eq!(bed.run(&["init"]).code, Some(0));
    // A server that lets nobody in without TLS.
    let rules = format!(
        "local all all trust\nhostnossl all {user} all reject\nhost all postgres all trust\nhost all all all scram-sha-256\n"
    );
    std::fs::write(bed.postgres.data.join("pg_hba.conf"), rules).unwrap();
    bed.sql("SELECT pg_reload_conf()");
    crate::support::eventually("plain connections are rejected", || {
        set(&mut bed, "disable", None, "localhost");
        let ended = bed.run(&["init"]);
        (ended.code == Some(2) && ended.line().contains("pg_hba.conf")).then_some(())
    });
    set(&mut bed, "require", None, "localhost");
    assert_eq!(bed.run(&["init"]).code, Some(0));
    let _ = std::fs::remove_dir_all(folder);
}

/// Without a CA file nothing but the channel binding of SCRAM tells a man in the middle.
fn scram_is_bound_to_the_tls_channel() {
    let folder = servers::folder("certificates");
    let (right, wrong) = (Authority::new(&folder, "right"), Authority::new(&folder, "wrong"));
    let mut bed = Bed::on(Arc::new(server_with_tls(&right)), shared_kafka());
    let user = owner_with_password(&mut bed, PASSWORD);
    let database = bed.database.clone();
    bed.settings.postgres = "tls_mode = 'require'".to_owned();
    let mut intercepted = |user: &str, connection| {
        let interceptor = Interceptor {
            server_port: bed.postgres.port,
            authority: std::fs::read_to_string(&right.file).unwrap(),
            shown: wrong.certify("localhost"),
            connection,
        };
        let port = interceptor.start();
        bed.settings.url =
            format!("postgres://{user}:{}@localhost:{port}/{database}", percent_encoded(PASSWORD));
        bed.write_config();
        bed.run(&["init"])
    };
    // It does work as one: where the server asks for no password, nobody notices.
    let trusted = intercepted("postgres", None);
    assert_eq!(trusted.code, Some(0), "{}", trusted.stderr);
    // The SQL session comes first, the replication session second.
    for connection in [0, 1] {
        let ended = intercepted(&user, Some(connection));
        assert_eq!(ended.code, Some(2), "connection {connection}: {ended:#?}");
        assert!(ended.line().contains("channel binding"), "{}", ended.line());
    }
    let untouched = intercepted(&user, Some(usize::MAX));
    assert_eq!(untouched.code, Some(0), "{}", untouched.stderr);
    let _ = std::fs::remove_dir_all(folder);
}

fn c75_a_missing_topic_is_waited_for() {
    let mut bed = Bed::new();
    bed.init();
    let name = format!("late-{}", bed.database);
    bed.settings.outbox = format!("[[outbox]]\ntable = 'outbox_event'\ntopic = '{name}'\n");
    bed.topic.name.clone_from(&name);
    bed.write_config();
    bed.insert(1, 5);
    let before = bed.positions();
    let mut worker = bed.start();
    let line = worker.says("waiting: ");
    assert_eq!(line["ready"], false);
    let said = line["message"].as_str().unwrap();
    assert!(said.contains(&format!("topic {name} does not exist")), "{said}");
    // It tries again, and does not say so each time.
    let connections = "SELECT sessions FROM pg_stat_database WHERE datname = current_database()";
    let first: i64 = bed.value(connections);
    crate::support::eventually("it has tried some more", || {
        (bed.value::<i64>(connections) > first + 8).then_some(())
    });
    assert_eq!(worker.logged("waiting: ").len(), 1);
    assert_eq!(bed.positions(), before);
    bed.topic = Topic::create(&bed.kafka.brokers(), &name, 6, &[]);
    worker.streams();
    assert_eq!(bed.arrived().1.repeats, 0);
    bed.confirmed();
}

fn an_unreachable_server_is_waited_for() {
    let mut bed = Bed::on(Arc::new(Postgres::start(&[])), shared_kafka());
    bed.init();
    bed.postgres.stop("fast");
    let ended = bed.run(&["init"]);
    assert_eq!(ended.code, Some(4), "{ended:#?}");
    assert!(ended.line().contains(&format!("127.0.0.1:{}", bed.postgres.port)), "{}", ended.line());
    let mut worker = bed.start();
    let line = worker.says("waiting: ");
    assert_eq!(line["ready"], false);
    assert!(
        line["message"].as_str().unwrap().contains(&format!("127.0.0.1:{}", bed.postgres.port)),
        "{line}"
    );
    bed.postgres.start_again();
    worker.streams();
    bed.client = postgres::Client::connect(&bed.postgres.url(&bed.database), NoTls).unwrap();
    bed.insert(1, 1);
    bed.arrived();
    worker.stop();
}

fn an_unreachable_broker_is_waited_for() {
    let kafka = Arc::new(Kafka::start(&[]));
    let mut bed = Bed::on(servers::shared_postgres(), Arc::clone(&kafka));
    bed.init();
    bed.insert(1, 1);
    kafka.stop("TERM");
    let mut worker = bed.start();
    let line = worker.says("waiting: ");
    assert_eq!(line["ready"], false);
    assert!(line["message"].as_str().unwrap().contains(&kafka.brokers()), "{line}");
    kafka.start_again();
    worker.streams();
    assert_eq!(bed.arrived().1.repeats, 0);
    worker.stop();
}
