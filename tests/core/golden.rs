//! The decoder on what PostgreSQL 14 to 18 really send for `tests/golden/scenario.sql`.

use std::collections::BTreeMap;

use outbox_tailer::relay::pgoutput::{Message, Value, decode};

const FILES: [(&str, &str); 5] = [
    ("14", include_str!("../golden/pgoutput-14.txt")),
    ("15", include_str!("../golden/pgoutput-15.txt")),
    ("16", include_str!("../golden/pgoutput-16.txt")),
    ("17", include_str!("../golden/pgoutput-17.txt")),
    ("18", include_str!("../golden/pgoutput-18.txt")),
];

fn messages(file: &str) -> Vec<Vec<u8>> {
    let hex = |text: &str| {
        (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
    };
    file.lines().filter(|l| !l.starts_with('#')).map(|l| hex(l.rsplit(' ').next().unwrap())).collect()
}

#[test]
fn every_message_of_every_version_decodes_and_the_counts_are_those_of_the_capture() {
    for (version, file) in FILES {
        let mut counts = BTreeMap::new();
        for bytes in messages(file) {
            decode(&bytes).unwrap_or_else(|e| panic!("PostgreSQL {version}: {e}"));
            *counts.entry(char::from(bytes[0])).or_insert(0) += 1;
        }
        let told =
            file.lines().find_map(|l| l.strip_prefix("# messages: ")).expect("the capture's own counts");
        let counted: Vec<String> = counts.iter().map(|(tag, n)| format!("{tag}={n}")).collect();
        assert_eq!(counted.join(" "), told, "PostgreSQL {version}");
        // Every message type of protocol 1 that the scenario makes.
        assert_eq!(counts.keys().collect::<String>(), "BCDIMORTUY", "PostgreSQL {version}");
    }
}

#[test]
fn inserts_carry_the_rows_of_the_scenario() {
    for (version, file) in FILES {
        let mut relations = BTreeMap::new();
        let mut rows = Vec::new();
        let decoded = messages(file);
        for bytes in &decoded {
            match decode(bytes).unwrap() {
                Message::Relation(relation) => drop(relations.insert(relation.oid, relation)),
                Message::Insert { relation, new } => {
                    let relation = &relations[&relation];
                    assert_eq!(new.len(), relation.columns.len(), "PostgreSQL {version}");
                    if relation.name == "outbox_event" {
                        let names = relation.columns.iter().map(|c| c.name.clone());
                        rows.push(names.zip(new.values()).collect::<BTreeMap<_, _>>());
                    }
                }
                _ => {}
            }
        }
        let first = &rows[0];
        assert_eq!(
            first["event_id"],
            Value::Text(b"00000000-0000-4000-8000-000000000001"),
            "PostgreSQL {version}"
        );
        assert_eq!(first["order_id"], Value::Text(b"1"));
        assert!(rows.iter().any(|row| row["event_type"] == Value::Text(b"")), "an empty text");
        assert!(rows.iter().any(|row| row.get("payload") == Some(&Value::Null)), "a NULL");
        let longest = rows.iter().filter_map(|row| match row.get("payload") {
            Some(Value::Text(text)) => Some(text.len()),
            _ => None,
        });
        assert!(longest.max() > Some(9_000), "a long payload");
        assert!(relations.values().any(|r| r.name == "commande_événement_表🎉"), "names are UTF-8");
    }
}

/// Cut anywhere, a real message is an error and nothing worse.
#[test]
fn truncated_messages_are_errors() {
    for (version, file) in FILES {
        for bytes in messages(file) {
            let cuts = (0..bytes.len()).filter(|cut| bytes.len() < 500 || cut % 97 == 0);
            for cut in cuts {
                assert!(
                    decode(&bytes[..cut]).is_err(),
                    "PostgreSQL {version}: {cut} of {} bytes",
                    bytes.len()
                );
            }
        }
    }
}
