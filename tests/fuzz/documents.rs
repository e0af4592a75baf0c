//! What is read back from outside: the witness's records and the descriptor of the publication. Any
//! bytes are one or an error; one is written as it is read, and can be compared with another.
//!
//! The first byte says where the input is cut in two.

use outbox_tailer::descriptor::{Descriptor, Difference};
use outbox_tailer::witness::{Record, greater};

pub fn check(input: &[u8]) {
    let Some((&cut, bytes)) = input.split_first() else { return };
    // In 256ths; 0 makes both the same.
    let (one, other) = match cut {
        0 => (bytes, bytes),
        cut => bytes.split_at(bytes.len() * usize::from(cut) / 256),
    };
    records(one, other);
    descriptors(one, other);
}

fn records(one: &[u8], other: &[u8]) {
    let read = |bytes: &[u8]| serde_json::from_slice::<Record>(bytes).ok();
    for record in [one, other].into_iter().filter_map(read) {
        let again = serde_json::to_vec(&record).expect("a record can be written");
        assert_eq!(read(&again), Some(record));
    }
    assert_eq!(greater(None, one.to_vec()), one);
    let counts = greater(Some(one.to_vec()), other.to_vec());
    let rank = |record: Record| (record.epoch, record.timeline, record.position);
    match (read(one).map(rank), read(other).map(rank)) {
        (Some(first), Some(second)) => assert_eq!(read(&counts).map(rank), Some(first.max(second))),
        // What cannot be read is the last, or goes unheard.
        _ => assert_eq!(counts, other),
    }
}

fn descriptors(one: &[u8], other: &[u8]) {
    let read = |bytes: &[u8]| serde_json::from_slice::<Descriptor>(bytes).ok();
    let (Some(accepted), Some(now)) = (read(one), read(other)) else { return };
    let again = serde_json::to_vec(&accepted).expect("a descriptor can be written");
    assert_eq!(read(&again).as_ref(), Some(&accepted));
    let _ = (accepted.excess(), now.excess());
    let difference = accepted.difference(&now, "p");
    if accepted.unsuitable("p").is_none() {
        assert_eq!(accepted.difference(&accepted, "p"), Difference::None);
    }
    match difference {
        Difference::None => {
            assert_eq!(accepted.publication, now.publication);
            let suits = |d: &Descriptor| d.tables.values().all(|table| table.is_some());
            assert!(accepted.tables.keys().eq(now.tables.keys()) && suits(&now), "a table goes by");
            assert!(now.leaves.iter().all(|(name, leaf)| accepted.leaves.get(name) == Some(leaf)));
        }
        Difference::NewLeaves(new) => {
            assert!(!new.is_empty() && new.keys().all(|name| !accepted.leaves.contains_key(name)));
        }
        Difference::Changed(what) => assert!(!what.is_empty()),
    }
}
