//! Any bytes are a message or an error, and a message is all of its bytes: encoding what was decoded
//! gives them back, and with a byte less or more they are an error.

use outbox_tailer::relay::pgoutput::{Message, Value, decode};

pub fn check(bytes: &[u8]) {
    let Ok(message) = decode(bytes) else { return };
    for cut in [bytes.len() - 1, bytes.len() / 2] {
        assert!(decode(&bytes[..cut]).is_err(), "{cut} of {} bytes decode, too", bytes.len());
    }
    assert!(decode(&[bytes, &[0]].concat()).is_err(), "trailing bytes are ignored");
    match message {
        Message::Begin(begin) => {
            let (lsn, time) = (u64::from(begin.commit_lsn), begin.commit_time_micros);
            let again = [&b"B"[..], &lsn.to_be_bytes(), &time.to_be_bytes(), &begin.xid.to_be_bytes()];
            assert_eq!(again.concat(), bytes);
        }
        Message::Commit(commit) => {
            let (lsn, end) = (u64::from(commit.commit_lsn), u64::from(commit.end_lsn));
            let time = commit.commit_time_micros;
            let again = [lsn.to_be_bytes(), end.to_be_bytes(), time.to_be_bytes()].concat();
            assert_eq!(again, bytes[2..], "after the tag and the flags");
        }
        Message::Relation(relation) => {
            assert_eq!(relation.oid.to_be_bytes(), bytes[1..5]);
            let names: usize = relation.columns.iter().map(|c| c.name.len()).sum();
            let schema = if bytes[5] == 0 { 0 } else { relation.schema.len() };
            // Names end with a NUL; replica identity, count; flags, type and modifier of each column.
            let len = 5 + schema + 1 + relation.name.len() + 1 + 3 + names + 10 * relation.columns.len();
            assert_eq!(len, bytes.len());
        }
        Message::Insert { relation, new } => {
            let values: Vec<_> = new.values().collect();
            assert_eq!((values.len(), values.is_empty()), (new.len(), new.is_empty()));
            let mut again = [&b"I"[..], &relation.to_be_bytes(), b"N"].concat();
            again.extend((values.len() as u16).to_be_bytes());
            for value in values {
                match value {
                    Value::Null => again.push(b'n'),
                    Value::Text(text) => {
                        again.push(b't');
                        again.extend((text.len() as u32).to_be_bytes());
                        again.extend(text);
                    }
                }
            }
            assert_eq!(again, bytes);
        }
        Message::Truncate { relations } => assert_eq!(bytes.len(), 6 + 4 * relations as usize),
        Message::Logical { transactional } => assert_eq!(transactional, bytes[1] & 1 == 1),
        _ => {}
    }
}
