//! The exact bytes that a consumer sees, for every kind of row.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use outbox_tailer::relay::router::partition;
use rdkafka::consumer::{BaseConsumer, Consumer as _};

use crate::support::bed::{Bed, EVENTS};
use crate::support::oracle::{self, Message, Topic};
use crate::support::servers::{shared_kafka, shared_postgres};
use crate::support::worker::Worker;
use crate::tests;

tests![
    an_order_event_has_exactly_these_bytes,
    the_timestamp_is_the_time_of_producing_or_of_the_commit,
    the_example_of_debeziums_documentation_has_the_same_bytes,
    a_null_payload_becomes_a_null_value,
    c02_empty_containers_arrive_as_they_are,
    c03_arrays_of_unlike_elements_arrive_as_they_are,
    c05_json_is_encoded_once,
    c06_unicode_escapes_of_jsonb_are_not_touched,
    c06_unicode_escapes_of_json_are_not_touched,
    c07_values_stored_out_of_line_arrive_whole,
    c09_batches_stay_below_the_topics_limit,
    c10_deep_nesting_is_no_problem,
    c12_json_and_text_arrive_byte_for_byte,
    c13_keys_of_every_type_are_the_servers_text,
    c14_an_empty_key_is_a_key_and_a_null_key_is_refused,
    c16_a_null_header_differs_from_an_empty_one,
    c17_topic_and_headers_are_used_exactly,
    c19_times_in_headers_do_not_depend_on_the_time_zone,
    c22_names_may_be_of_any_language,
    c23_names_may_hold_quotes_and_backslashes,
    c25_columns_that_differ_by_case_are_told_apart,
    c26_the_same_table_in_two_schemas_is_told_apart,
    c29_enums_and_domains_arrive_as_text,
    c46_the_order_is_that_of_the_commits,
    several_outbox_tables_have_their_own_topics_and_columns,
    a_renamed_column_is_found_under_both_names,
];

/// The table of the public cases, with the type of its payload to fill in.
fn case_table(payload: &str) -> String {
    format!(
        "CREATE TABLE outbox_event (id bigserial PRIMARY KEY, order_id text, event_type text NOT NULL DEFAULT 'OrderPlaced',
           payload {payload}, created_at timestamptz NOT NULL DEFAULT now())"
    )
}

/// Tables and their `[[outbox]]` configuration, in which TOPIC stands for the test's topic.
fn bed_with(tables: &str, outbox: &str, topic_settings: &[(&str, &str)]) -> Bed {
    let mut bed = Bed::with(shared_postgres(), shared_kafka(), tables, topic_settings);
    bed.settings.outbox = outbox.replace("TOPIC", &bed.topic.name);
    bed.write_config();
    bed
}

const CASE_OUTBOX: &str = "[[outbox]]
table = 'public.outbox_event'
topic = 'TOPIC'
id = 'id'
key = 'order_id'
headers = [{ name = 'eventType', column = 'event_type' }]
";

fn case_bed(payload: &str) -> (Bed, Worker) {
    started(bed_with(&case_table(payload), CASE_OUTBOX, &[]))
}

fn started(mut bed: Bed) -> (Bed, Worker) {
    bed.init();
    let worker = bed.streaming();
    (bed, worker)
}

/// Inserts one row of the case table for each payload, in one transaction.
fn insert_payloads(bed: &mut Bed, payloads: &[&str]) {
    let row = |payload: &&str| {
        format!("INSERT INTO outbox_event (order_id, payload) VALUES ('k', $j${payload}$j$)")
    };
    let rows: Vec<String> = payloads.iter().map(row).collect();
    bed.sql(&format!("BEGIN; {}; COMMIT", rows.join(";")));
}

/// Waits for all that is committed, and compares each message with the text of its row in the case
/// table; gives the messages in the order of their ids.
fn verbatim(bed: &mut Bed) -> Vec<Message> {
    let (mut messages, verdict) = bed.arrived();
    assert_eq!(verdict.repeats, 0);
    let sql = "SELECT id::text, order_id::text, payload::text, event_type::text FROM outbox_event";
    let rows = bed.client.query(sql, &[]).unwrap();
    assert_eq!(messages.len(), rows.len());
    for row in rows {
        let (id, key, value, kind): (String, String, Option<String>, String) =
            (row.get(0), row.get(1), row.get(2), row.get(3));
        let message = messages.iter().find(|m| m.id() == id).unwrap();
        assert_eq!(message.key(), key);
        assert_eq!(message.value.as_deref(), value.as_deref().map(str::as_bytes));
        let headers =
            [("id".to_owned(), Some(id.into_bytes())), ("eventType".to_owned(), Some(kind.into_bytes()))];
        assert_eq!(message.headers, headers);
    }
    messages.sort_by_key(|m| m.id().parse::<i64>().unwrap());
    messages
}

fn values(messages: &[Message]) -> Vec<String> {
    messages.iter().map(Message::value).collect()
}

/// Ends the worker and makes sure that nothing was refused or had to be tried again.
fn ends_without_trouble(mut worker: Worker) {
    worker.stop();
    // A line with a facility is librdkafka's own: it says so while a fresh broker still loads.
    let troubled = |line: &serde_json::Value| {
        ["WARN", "ERROR"].contains(&line["level"].as_str().unwrap_or("ERROR")) && line["facility"].is_null()
    };
    let trouble: Vec<_> = worker.log().into_iter().filter(troubled).collect();
    assert!(trouble.is_empty(), "{trouble:#?}");
}

fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis().try_into().unwrap()
}

fn an_order_event_has_exactly_these_bytes() {
    let mut bed = Bed::new();
    bed.init();
    let worker = bed.streaming();
    for key in [1, 2, 3, 42, 1_000_000_007, i64::MAX] {
        bed.insert(key, 2);
    }
    let (messages, verdict) = bed.arrived();
    assert_eq!(verdict.repeats, 0);
    let sql =
        "SELECT event_id::text, order_id::text, revision::text, event_type, payload::text FROM outbox_event";
    let rows = bed.client.query(sql, &[]).unwrap();
    assert_eq!((rows.len(), messages.len()), (12, 12));
    for row in rows {
        let [id, key, revision, kind, payload] = std::array::from_fn(|i| row.get::<_, String>(i));
        let message = messages.iter().find(|m| m.id() == id).unwrap();
        assert_eq!(id.len(), 36);
        assert_eq!(message.key.as_deref(), Some(key.as_bytes()));
        assert_eq!(message.value.as_deref(), Some(payload.as_bytes()));
        assert_eq!(message.partition, partition(key.as_bytes(), 6));
        let header = |name: &str, value: String| (name.to_owned(), Some(value.into_bytes()));
        assert_eq!(
            message.headers,
            [header("id", id), header("eventType", kind), header("revision", revision)]
        );
    }
    assert!(messages.iter().map(|m| m.partition).collect::<BTreeSet<_>>().len() > 2, "keys are spread");
    ends_without_trouble(worker);
}

fn the_timestamp_is_the_time_of_producing_or_of_the_commit() {
    let table = |name: &str| case_table("jsonb").replace("outbox_event", name);
    let outbox =
        |name: &str, timestamp: &str| format!("{}{timestamp}\n", CASE_OUTBOX.replace("outbox_event", name));
    let tables = format!("{};{}", table("produced"), table("committed"));
    let mut bed = bed_with(
        &tables,
        &format!("{}{}", outbox("produced", ""), outbox("committed", "timestamp = 'commit'")),
        &[],
    );
    bed.exempt(EVENTS, "the two tables have the same ids");
    bed.init();
    let before = now_ms();
    bed.sql("BEGIN; INSERT INTO produced (order_id) VALUES ('p'); INSERT INTO committed (order_id) VALUES ('c'); COMMIT");
    let after = now_ms();
    crate::support::eventually("the clock has moved on", || (now_ms() > after + 5).then_some(()));
    let started = now_ms();
    let worker = bed.streaming();
    let messages = bed.topic.wait_for_count(2);
    let timestamp = |key: &str| messages.iter().find(|m| m.key() == key).unwrap().timestamp_ms.unwrap();
    assert!((started..=now_ms()).contains(&timestamp("p")), "{} from {started}", timestamp("p"));
    assert!((before..=after).contains(&timestamp("c")), "{} in {before} to {after}", timestamp("c"));
    ends_without_trouble(worker);
}

/// `debezium-contract.md` §2: what Debezium with the string converter makes of this row.
fn the_example_of_debeziums_documentation_has_the_same_bytes() {
    const VALUE: &str = r#"{"id": 1, "lineItems": [{"id": 1, "item": "Debezium in Action", "status": "ENTERED", "quantity": 2, "totalPrice": 39.98}, {"id": 2, "item": "Debezium for Dummies", "status": "ENTERED", "quantity": 1, "totalPrice": 29.99}], "orderDate": "2019-01-31T12:13:01", "customerId": 123}"#;
    assert_eq!(VALUE.len(), 277);
    let table = "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,
                   type varchar(255) NOT NULL, payload jsonb)";
    let outbox = "[[outbox]]\ntable = 'outbox'\npreset = 'debezium'\ntopic = 'TOPIC'\n";
    let (mut bed, worker) = started(bed_with(table, outbox, &[]));
    // The document as the service writes it: jsonb fixes order and spaces.
    let written = r#"{"id":1,"lineItems":[{"id":1,"item":"Debezium in Action","status":"ENTERED","quantity":2,"totalPrice":39.98},
        {"id":2,"item":"Debezium for Dummies","status":"ENTERED","quantity":1,"totalPrice":29.99}],"orderDate":"2019-01-31T12:13:01","customerId":123}"#;
    bed.sql(&format!("INSERT INTO outbox VALUES ('4d47e190-0402-4048-bc2c-89dd54343cdc', 'order', '1', 'OrderCreated', '{written}')"));
    let (messages, _) = bed.arrived();
    let [message] = messages.try_into().unwrap();
    assert_eq!(message.key.as_deref(), Some(&b"1"[..]));
    assert_eq!(message.value.as_deref(), Some(VALUE.as_bytes()));
    let header = |name: &str, value: &str| (name.to_owned(), Some(value.as_bytes().to_vec()));
    let id = header("id", "4d47e190-0402-4048-bc2c-89dd54343cdc");
    assert_eq!(message.headers, [id, header("eventType", "OrderCreated")]);
    ends_without_trouble(worker);
}

fn a_null_payload_becomes_a_null_value() {
    let (mut bed, worker) = case_bed("jsonb");
    bed.sql("INSERT INTO outbox_event (order_id, payload) VALUES ('k', NULL), ('k', 'null')");
    let messages = verbatim(&mut bed);
    assert_eq!(messages[0].value, None);
    assert_eq!(messages[1].value.as_deref(), Some(&b"null"[..]));
    ends_without_trouble(worker);
}

fn c02_empty_containers_arrive_as_they_are() {
    let (mut bed, worker) = case_bed("jsonb");
    insert_payloads(&mut bed, &[r#"{"lines":[],"meta":{},"a":[[],[1]]}"#, "{}", "[]"]);
    let messages = verbatim(&mut bed);
    assert_eq!(values(&messages), [r#"{"a": [[], [1]], "meta": {}, "lines": []}"#, "{}", "[]"]);
    ends_without_trouble(worker);
}

fn c03_arrays_of_unlike_elements_arrive_as_they_are() {
    let (mut bed, worker) = case_bed("jsonb");
    insert_payloads(&mut bed, &[r#"{"a":[null,1,"x",{"k":1},{"k":"s","j":[]}]}"#, r#"{"ok":true}"#]);
    let messages = verbatim(&mut bed);
    assert_eq!(
        values(&messages),
        [r#"{"a": [null, 1, "x", {"k": 1}, {"j": [], "k": "s"}]}"#, r#"{"ok": true}"#]
    );
    ends_without_trouble(worker);
}

fn c05_json_is_encoded_once() {
    let (mut bed, worker) = case_bed("jsonb");
    insert_payloads(&mut bed, &[r#"{"a":"q\"uote"}"#, "[1,2]", r#""plain""#, "true", "7"]);
    let messages = verbatim(&mut bed);
    let parsed = |m: &Message| serde_json::from_slice(m.value.as_deref().unwrap()).unwrap();
    let parsed: Vec<serde_json::Value> = messages.iter().map(parsed).collect();
    assert_eq!(
        serde_json::Value::from(parsed),
        serde_json::json!([{"a": "q\"uote"}, [1, 2], "plain", true, 7])
    );
    ends_without_trouble(worker);
}

fn c06_unicode_escapes_of_jsonb_are_not_touched() {
    let (mut bed, worker) = case_bed("jsonb");
    insert_payloads(&mut bed, &[r#"{"a":"\u00e9\ud83d\ude00","b":"\\u0000","c":"tab\tend","d":"\u2028"}"#]);
    let messages = verbatim(&mut bed);
    // jsonb makes characters of escapes; a backslash before u0000 stays one.
    assert_eq!(
        values(&messages),
        ["{\"a\": \"é😀\", \"b\": \"\\\\u0000\", \"c\": \"tab\\tend\", \"d\": \"\u{2028}\"}"]
    );
    ends_without_trouble(worker);
}

fn c06_unicode_escapes_of_json_are_not_touched() {
    let (mut bed, worker) = case_bed("json");
    let typed = r#"{"x":"\u0000","a":"\u00e9\ud83d\ude00"}"#;
    insert_payloads(&mut bed, &[typed]);
    assert_eq!(values(&verbatim(&mut bed)), [typed]);
    ends_without_trouble(worker);
}

fn c07_values_stored_out_of_line_arrive_whole() {
    let table =
        format!("{}; ALTER TABLE outbox_event ALTER payload SET STORAGE EXTERNAL", case_table("text"));
    let (mut bed, worker) = started(bed_with(&table, CASE_OUTBOX, &[("max.message.bytes", "2097152")]));
    for kilobytes in [300, 900] {
        bed.sql(&format!(
            "INSERT INTO outbox_event (order_id, payload)
             SELECT 'k', string_agg(md5(random()::text || n), '') FROM generate_series(1, {kilobytes} * 1000 / 32) n"
        ));
    }
    let messages = verbatim(&mut bed);
    assert_eq!(messages.iter().map(|m| m.value().len()).collect::<Vec<_>>(), [300_000, 900_000]);
    // The new row versions carry "unchanged, stored out of line"; they are no events.
    bed.sql("UPDATE outbox_event SET event_type = 'X'; INSERT INTO outbox_event (order_id) VALUES ('after')");
    assert_eq!(bed.topic.wait_for_count(3).len(), 3);
    ends_without_trouble(worker);
}

fn c09_batches_stay_below_the_topics_limit() {
    let mut bed = bed_with(&case_table("text"), CASE_OUTBOX, &[("max.message.bytes", "262144")]);
    bed.settings.properties = "'linger.ms' = 200".to_owned();
    bed.write_config();
    let (mut bed, worker) = started(bed);
    bed.sql(
        "INSERT INTO outbox_event (order_id, payload)
         SELECT (n % 7)::text, repeat(md5(n::text), 64) FROM generate_series(1, 5000) n",
    );
    // Their order for each key is checked, too.
    assert_eq!(verbatim(&mut bed).len(), 5000);
    bed.confirmed();
    ends_without_trouble(worker);
}

fn c10_deep_nesting_is_no_problem() {
    let (mut bed, worker) = case_bed("jsonb");
    bed.sql(
        r#"INSERT INTO outbox_event (order_id, payload) VALUES ('d', (repeat('[', 6000) || repeat(']', 6000))::jsonb),
             ('d', (repeat('{"k":', 500) || '1' || repeat('}', 500))::jsonb)"#,
    );
    let messages = verbatim(&mut bed);
    assert_eq!(messages[0].value().len(), 12_000);
    ends_without_trouble(worker);
}

fn c12_json_and_text_arrive_byte_for_byte() {
    let typed = ["{ \"b\" : 1,  \"a\":2 , \"b\":3 }", "\n[ 1.10, 19.999999999999999999 ]\t"];
    for kind in ["json", "text"] {
        let (mut bed, worker) = case_bed(kind);
        insert_payloads(&mut bed, &typed);
        assert_eq!(values(&verbatim(&mut bed)), typed);
        ends_without_trouble(worker);
    }
}

fn c13_keys_of_every_type_are_the_servers_text() {
    let cases = [
        ("int", "-5", "-5"),
        ("bigint", "9223372036854775807", "9223372036854775807"),
        ("uuid", "'4D47E190-0402-4048-BC2C-89DD54343CDC'", "4d47e190-0402-4048-bc2c-89dd54343cdc"),
        ("numeric(20,0)", "12345678901234567890", "12345678901234567890"),
        ("varchar", "' 7 '", " 7 "),
        // char is padded, as PostgreSQL prints it.
        ("char(5)", "'ab'", "ab   "),
    ];
    let name = |n: usize| format!("outbox_{n}");
    let table = |(n, (kind, _, _)): (usize, &(&str, &str, &str))| {
        format!(
            "CREATE TABLE {} (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), order_id {kind}, event_type text, payload jsonb)",
            name(n)
        )
    };
    let tables: Vec<String> = cases.iter().enumerate().map(table).collect();
    let outbox: String = (0..cases.len()).map(|n| CASE_OUTBOX.replace("outbox_event", &name(n))).collect();
    let (mut bed, worker) = started(bed_with(&tables.join(";"), &outbox, &[]));
    for (n, (_, literal, key)) in cases.iter().enumerate() {
        let id: String =
            bed.value(&format!("INSERT INTO {} (order_id) VALUES ({literal}) RETURNING id::text", name(n)));
        let (messages, _) = bed.arrived();
        let message = messages.iter().find(|m| m.id() == id).unwrap();
        assert_eq!(message.key.as_deref(), Some(key.as_bytes()));
        assert_eq!(message.partition, partition(key.as_bytes(), 6));
    }
    ends_without_trouble(worker);
}

fn c14_an_empty_key_is_a_key_and_a_null_key_is_refused() {
    let (mut bed, mut worker) = case_bed("jsonb");
    bed.sql(
        "INSERT INTO outbox_event (order_id) SELECT k FROM unnest(ARRAY['', 'a']) k, generate_series(1, 50)",
    );
    let messages = verbatim(&mut bed);
    let places = |key: &[u8]| {
        let of_key: Vec<&Message> = messages.iter().filter(|m| m.key.as_deref() == Some(key)).collect();
        assert_eq!(of_key.len(), 50);
        of_key.iter().map(|m| m.partition).collect::<BTreeSet<_>>()
    };
    assert_eq!(places(b""), BTreeSet::from([partition(b"", 6)]));
    assert_eq!(places(b"a"), BTreeSet::from([partition(b"a", 6)]));
    bed.confirmed();
    let id: String = bed.value("INSERT INTO outbox_event (order_id) VALUES (NULL) RETURNING id::text");
    bed.sql("INSERT INTO outbox_event (order_id) VALUES ('after')");
    let said = worker.refuses("poison");
    assert!(said.contains("key is NULL") && said.contains(&format!("skip {id}")), "{said}");
    assert_eq!(bed.topic.read().len(), 100);
    let refused = bed.committed().events.into_iter().find(|event| event.id == id).unwrap();
    let (confirmed, persisted) = bed.positions();
    assert!(confirmed <= persisted && persisted < refused.end_lsn, "confirmed past a refused event");
}

fn c16_a_null_header_differs_from_an_empty_one() {
    let table = format!("{}; ALTER TABLE outbox_event ADD trace_id text", case_table("jsonb"));
    let outbox = "[[outbox]]
table = 'outbox_event'
topic = 'TOPIC'
id = 'id'
key = 'order_id'
headers = [{ name = 'traceId', column = 'trace_id' }, { name = 'eventType', column = 'event_type' }]
";
    let (mut bed, worker) = started(bed_with(&table, outbox, &[]));
    bed.sql("INSERT INTO outbox_event (order_id, trace_id) VALUES ('k', NULL), ('k', ''), ('k', 't-1')");
    let (messages, _) = bed.arrived();
    for (id, trace) in [("1", None), ("2", Some("")), ("3", Some("t-1"))] {
        let header =
            |name: &str, value: Option<&str>| (name.to_owned(), value.map(|v| v.as_bytes().to_vec()));
        let message = messages.iter().find(|m| m.id() == id).unwrap();
        let expected =
            [header("id", Some(id)), header("traceId", trace), header("eventType", Some("OrderPlaced"))];
        assert_eq!(message.headers, expected);
    }
    ends_without_trouble(worker);
}

fn c17_topic_and_headers_are_used_exactly() {
    let mut bed = bed_with(&case_table("jsonb"), "", &[]);
    let name = format!("Orders.V1-{}_X", bed.database);
    bed.topic = Topic::create(&bed.kafka.brokers(), &name, 6, &[]);
    bed.settings.outbox = CASE_OUTBOX.replace("TOPIC", &name);
    bed.write_config();
    let (mut bed, worker) = started(bed);
    let long = "e".repeat(260);
    for kind in ["OrderPlaced", "commande-créée", "a/b c", &long] {
        bed.client
            .execute("INSERT INTO outbox_event (order_id, event_type) VALUES ('k', $1)", &[&kind])
            .unwrap();
    }
    let messages = verbatim(&mut bed);
    assert_eq!(messages[1].headers[1].1.as_deref(), Some("commande-créée".as_bytes()));
    let consumer: BaseConsumer = oracle::consumer(&bed.kafka.brokers());
    let metadata = consumer.fetch_metadata(None, std::time::Duration::from_secs(10)).unwrap();
    let of_that_name = |topic: &&str| topic.eq_ignore_ascii_case(&name);
    let topics: Vec<&str> = metadata.topics().iter().map(|t| t.name()).filter(of_that_name).collect();
    assert_eq!(topics, [name.as_str()]);
    ends_without_trouble(worker);
}

fn c19_times_in_headers_do_not_depend_on_the_time_zone() {
    let outbox = CASE_OUTBOX.replace("event_type", "created_at");
    let mut bed = bed_with(&case_table("jsonb"), &outbox, &[]);
    bed.init();
    let zones = ["UTC", "Asia/Kolkata", "America/St_Johns", "Europe/Amsterdam"];
    for zone in zones {
        let database = bed.database.clone();
        bed.sql(&format!("ALTER DATABASE {database} SET TimeZone = '{zone}'; ALTER DATABASE {database} SET DateStyle = 'German'"));
        let worker = bed.streaming();
        bed.sql(
            "INSERT INTO outbox_event (order_id, created_at) VALUES ('k', '2019-03-24 20:52:59+00'),
               ('k', '2019-03-24 20:52:59.123456+00'), ('k', '1900-01-01 12:00:00 Europe/Amsterdam')",
        );
        bed.arrived();
        ends_without_trouble(worker);
    }
    let messages = bed.topic.wait_for_count(12);
    for message in messages {
        let text = match message.id().parse::<usize>().unwrap() % 3 {
            1 => "2019-03-24 20:52:59+00",
            2 => "2019-03-24 20:52:59.123456+00",
            // Amsterdam's offset was 19 minutes and 32 seconds; newer zone data says 18 minutes.
            _ => &bed.value::<String>("SELECT to_char('1900-01-01 12:00:00 Europe/Amsterdam'::timestamptz AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || '+00'"),
        };
        assert_eq!(message.header("eventType").as_deref(), Some(text));
    }
}

fn c22_names_may_be_of_any_language() {
    let table = r#"CREATE TABLE "commande_événement_表🎉" (id bigserial PRIMARY KEY, "clé" text, "données" jsonb, "類型" text DEFAULT 'créée')"#;
    let outbox = "[[outbox]]
table = 'commande_événement_表🎉'
topic = 'TOPIC'
id = 'id'
key = 'clé'
payload = 'données'
headers = [{ name = 'eventType', column = '類型' }]
";
    let mut bed = bed_with(table, outbox, &[]);
    let made = bed.run(&["init"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    assert!(made.stdout.contains("commande_événement_表🎉"), "{}", made.stdout);
    let worker = bed.streaming();
    bed.sql(r#"INSERT INTO "commande_événement_表🎉" ("clé", "données") VALUES ('é', '{"ü": "表"}')"#);
    let [message] = bed.topic.wait_for_count(1).try_into().unwrap();
    assert_eq!((message.key(), message.value()), ("é".to_owned(), r#"{"ü": "表"}"#.to_owned()));
    assert_eq!(message.header("eventType").as_deref(), Some("créée"));
    ends_without_trouble(worker);
}

fn c23_names_may_hold_quotes_and_backslashes() {
    let table = r#"CREATE TABLE "out\box" (id bigserial PRIMARY KEY, "'quoted'" text, "pay""load" jsonb); CREATE TABLE t ()"#;
    let outbox = r#"[[outbox]]
table = 'public.out\box'
topic = 'TOPIC'
id = 'id'
key = "'quoted'"
payload = 'pay"load'
headers = []
"#;
    for publication in ["a\"b", "x'; DROP TABLE t; --"] {
        let mut bed = bed_with(table, outbox, &[]);
        bed.publication = publication.to_owned();
        bed.observed = publication.to_owned();
        bed.write_config();
        let database = bed.database.clone();
        bed.sql(&format!("ALTER DATABASE {database} SET standard_conforming_strings = off"));
        bed.init();
        let worker = bed.streaming();
        bed.sql(r#"INSERT INTO "out\box" ("'quoted'", "pay""load") VALUES ('k\''s', '{"a": "\\"}')"#);
        let [message] = bed.topic.wait_for_count(1).try_into().unwrap();
        assert_eq!((message.key(), message.value()), (r"k\'s".to_owned(), r#"{"a": "\\"}"#.to_owned()));
        assert!(bed.value::<bool>("SELECT to_regclass('t') IS NOT NULL"));
        let published = "SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = $1)";
        assert!(bed.client.query_one(published, &[&publication]).unwrap().get::<_, bool>(0));
        ends_without_trouble(worker);
    }
}

fn c25_columns_that_differ_by_case_are_told_apart() {
    let table = format!(
        r#"{}; ALTER TABLE outbox_event ADD "Payload" text DEFAULT 'wrong', ADD "Order_Id" text DEFAULT 'wrong'"#,
        case_table("jsonb")
    );
    let (mut bed, worker) = started(bed_with(&table, CASE_OUTBOX, &[]));
    insert_payloads(&mut bed, &[r#"{"right": true}"#]);
    assert_eq!(values(&verbatim(&mut bed)), [r#"{"right": true}"#]);
    ends_without_trouble(worker);
}

fn c26_the_same_table_in_two_schemas_is_told_apart() {
    let table = case_table("jsonb");
    let tables =
        format!("{table}; CREATE SCHEMA tenant2; {}", table.replace("outbox_event", "tenant2.outbox_event"));
    let mut bed = bed_with(&tables, &CASE_OUTBOX.replace("public.", "tenant2."), &[]);
    let publication = bed.publication.clone();
    bed.sql(&format!(
        "CREATE PUBLICATION {publication} FOR ALL TABLES WITH (publish_via_partition_root = true)"
    ));
    let made = bed.run(&["init"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    bed.observed = format!("{publication}_tenant2");
    let observe = format!("CREATE PUBLICATION {} FOR TABLE tenant2.outbox_event", bed.observed);
    bed.sql(&observe);
    let mut worker = bed.streaming();
    bed.sql(
        "INSERT INTO outbox_event (order_id) SELECT 'public' FROM generate_series(1, 10);
         INSERT INTO tenant2.outbox_event (order_id) SELECT 'tenant2' FROM generate_series(1, 10)",
    );
    let messages = bed.topic.wait_for_count(10);
    assert_eq!(messages.len(), 10);
    assert!(messages.iter().all(|m| m.key() == "tenant2"));
    worker.stop();
    // Beside the ten rows, what `init` wrote to its own tables.
    let ignored = worker.logged("session ended")[0]["ignored_other_tables"].as_i64().unwrap();
    assert!((10..15).contains(&ignored), "{ignored}");
}

fn c29_enums_and_domains_arrive_as_text() {
    let table = "CREATE TYPE st AS ENUM ('new'); CREATE DOMAIN oid_ AS uuid; CREATE DOMAIN doc AS jsonb;
                 CREATE TABLE outbox_event (id bigserial PRIMARY KEY, order_id oid_, event_type st NOT NULL, payload doc)";
    let (mut bed, worker) = started(bed_with(table, CASE_OUTBOX, &[]));
    let insert = |kind: &str| {
        format!(
            "INSERT INTO outbox_event (order_id, event_type, payload) VALUES ('10711fa5-0000-4000-8000-000000000001', '{kind}', '{{}}')"
        )
    };
    bed.sql(&insert("new"));
    assert_eq!(verbatim(&mut bed).len(), 1);
    bed.sql("ALTER TYPE st ADD VALUE 'paid'");
    bed.sql(&insert("paid"));
    assert_eq!(verbatim(&mut bed)[1].header("eventType").as_deref(), Some("paid"));
    assert_eq!(worker.logged("streaming").len(), 1);
    ends_without_trouble(worker);
}

fn c46_the_order_is_that_of_the_commits() {
    let (mut bed, worker) = case_bed("jsonb");
    let mut slow = bed.connect();
    slow.batch_execute("BEGIN; INSERT INTO outbox_event (id, order_id) VALUES (101, '7')").unwrap();
    bed.sql("INSERT INTO outbox_event (id, order_id) VALUES (102, '7')");
    slow.batch_execute("COMMIT").unwrap();
    bed.sql(
        "BEGIN; INSERT INTO outbox_event (id, order_id) VALUES (105, '7');
         INSERT INTO outbox_event (id, order_id) VALUES (103, '7');
         INSERT INTO outbox_event (id, order_id) VALUES (104, '7'); COMMIT",
    );
    let messages = bed.topic.wait_for_count(5);
    let ids: Vec<String> = messages.iter().map(Message::id).collect();
    assert_eq!(ids, ["102", "101", "105", "103", "104"]);
    assert!(messages.iter().all(|m| m.partition == partition(b"7", 6)));
    ends_without_trouble(worker);
}

fn several_outbox_tables_have_their_own_topics_and_columns() {
    let tables = "CREATE SCHEMA billing;
        CREATE TABLE outbox_event (event_id uuid PRIMARY KEY DEFAULT gen_random_uuid(), order_id bigint, revision int, event_type text, payload jsonb);
        CREATE TABLE billing.invoice_outbox (id bigserial PRIMARY KEY, invoice text, body text, amount numeric(10,2));
        CREATE TABLE billing.outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text, aggregateid text, type text, payload json)";
    let mut bed = bed_with(tables, "", &[]);
    let topic =
        |suffix: &str| Topic::create(&bed.kafka.brokers(), &format!("{}-{suffix}", bed.database), 3, &[]);
    let (invoices, others) = (topic("invoices"), topic("others"));
    bed.settings.outbox = format!(
        "[[outbox]]
table = 'outbox_event'
topic = '{}'
[[outbox]]
table = 'billing.invoice_outbox'
topic = '{}'
id = 'id'
key = 'invoice'
payload = 'body'
headers = [{{ name = 'amount', column = 'amount' }}]
[[outbox]]
table = 'billing.outbox'
preset = 'debezium'
topic = '{}'
",
        bed.topic.name, invoices.name, others.name
    );
    bed.write_config();
    bed.exempt(EVENTS, "they are in three topics");
    let (mut bed, worker) = started(bed);
    bed.sql(
        "BEGIN;
         INSERT INTO outbox_event (order_id, revision, event_type, payload) VALUES (1, 1, 'OrderPaid', '{}');
         INSERT INTO billing.invoice_outbox (invoice, body, amount) VALUES ('i-1', 'hello', 19.90);
         INSERT INTO billing.outbox (aggregatetype, aggregateid, type, payload) VALUES ('x', 'o-1', 'Made', '[ ]');
         COMMIT",
    );
    let seen = |topic: &Topic| {
        let [message] = topic.wait_for_count(1).try_into().unwrap();
        let headers: Vec<(String, String)> = message.headers[1..]
            .iter()
            .map(|(name, value)| (name.clone(), String::from_utf8(value.clone().unwrap()).unwrap()))
            .collect();
        (message.key(), message.value(), headers, message.partition)
    };
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let orders = vec![header("eventType", "OrderPaid"), header("revision", "1")];
    assert_eq!(seen(&bed.topic), ("1".into(), "{}".into(), orders, partition(b"1", 6)));
    let amount = vec![header("amount", "19.90")];
    assert_eq!(seen(&invoices), ("i-1".into(), "hello".into(), amount, partition(b"i-1", 3)));
    assert_eq!(
        seen(&others),
        ("o-1".into(), "[ ]".into(), vec![header("eventType", "Made")], partition(b"o-1", 3))
    );
    ends_without_trouble(worker);
    [&invoices, &others].into_iter().for_each(Topic::delete);
}

fn a_renamed_column_is_found_under_both_names() {
    let outbox = format!("{CASE_OUTBOX}payload = ['payload', 'body']\n");
    let mut bed = bed_with(&case_table("jsonb"), &outbox, &[]);
    bed.init();
    // A backlog that holds rows of both names, with no worker running.
    bed.sql("INSERT INTO outbox_event (order_id, payload) VALUES ('k', '1')");
    bed.sql("ALTER TABLE outbox_event RENAME payload TO body");
    bed.sql("INSERT INTO outbox_event (order_id, body) VALUES ('k', '2')");
    let worker = bed.streaming();
    bed.arrived();
    // And while it runs.
    bed.sql("ALTER TABLE outbox_event RENAME body TO payload");
    bed.sql("INSERT INTO outbox_event (order_id, payload) VALUES ('k', '3')");
    let (messages, _) = bed.arrived();
    let by_id: BTreeMap<String, String> = messages.iter().map(|m| (m.id(), m.value())).collect();
    assert_eq!(by_id.into_values().collect::<Vec<_>>(), ["1", "2", "3"]);
    ends_without_trouble(worker);
}
