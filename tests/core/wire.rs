//! Encodes pgoutput messages (PostgreSQL manual, "Logical Replication Message Formats").

pub const OUTBOX_OID: u32 = 100;
pub const OTHER_OID: u32 = 200;

pub fn begin(commit_lsn: u64) -> Vec<u8> {
    [&b"B"[..], &commit_lsn.to_be_bytes(), &0i64.to_be_bytes(), &7u32.to_be_bytes()].concat()
}

pub fn commit(commit_lsn: u64, end_lsn: u64) -> Vec<u8> {
    [&b"C\0"[..], &commit_lsn.to_be_bytes(), &end_lsn.to_be_bytes(), &0i64.to_be_bytes()].concat()
}

/// A relation with text columns.
pub fn relation(oid: u32, name: &str, columns: &[&str]) -> Vec<u8> {
    let mut bytes = [&b"R"[..], &oid.to_be_bytes(), b"public\0", name.as_bytes(), b"\0d"].concat();
    bytes.extend((columns.len() as u16).to_be_bytes());
    for column in columns {
        bytes.extend(
            [&b"\0"[..], column.as_bytes(), b"\0", &25u32.to_be_bytes(), &(-1i32).to_be_bytes()].concat(),
        );
    }
    bytes
}

/// `None` is SQL NULL.
pub fn insert(oid: u32, values: &[Option<&str>]) -> Vec<u8> {
    let mut bytes = [&b"I"[..], &oid.to_be_bytes(), b"N", &(values.len() as u16).to_be_bytes()].concat();
    for value in values {
        match value {
            None => bytes.push(b'n'),
            Some(text) => {
                bytes.extend([&b"t"[..], &(text.len() as u32).to_be_bytes(), text.as_bytes()].concat())
            }
        }
    }
    bytes
}
