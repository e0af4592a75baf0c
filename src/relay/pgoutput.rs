//! pgoutput, protocol version 1: the bytes of one message → [`Message`].
//!
//! Source of the formats: PostgreSQL manual, "Logical Replication Message Formats". Decoding
//! borrows from the input and allocates only for a Relation's columns; every length is checked
//! against the bytes that are there, so malformed input is an error, never a panic or a huge
//! allocation.

use super::Lsn;

/// One pgoutput message of protocol version 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message<'a> {
    Begin(Begin),
    Commit(Commit),
    Origin,
    Relation(Relation),
    Type,
    Insert {
        relation: u32,
        new: Tuple<'a>,
    },
    Update {
        relation: u32,
    },
    Delete {
        relation: u32,
    },
    Truncate {
        relations: u32,
    },
    /// `pg_logical_emit_message`; non-transactional ones arrive outside Begin..Commit.
    Logical {
        transactional: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begin {
    /// LSN of the commit record.
    pub commit_lsn: Lsn,
    /// Microseconds since 2000-01-01 UTC (PostgreSQL's epoch).
    pub commit_time_micros: i64,
    pub xid: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Commit {
    pub commit_lsn: Lsn,
    /// First byte after the commit record: what may be confirmed once all before it is delivered.
    pub end_lsn: Lsn,
    /// Microseconds since 2000-01-01 UTC (PostgreSQL's epoch).
    pub commit_time_micros: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relation {
    pub oid: u32,
    pub schema: String,
    pub name: String,
    pub columns: Vec<Column>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    pub type_oid: u32,
}

/// The values of a row, in the order of the Relation's columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuple<'a> {
    columns: u16,
    bytes: &'a [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    Null,
    Text(&'a [u8]),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the message ends {missing} bytes too early")]
    Truncated { missing: usize },
    #[error("the message has {0} bytes too many")]
    Trailing(usize),
    #[error("unknown message type {0:#04x}")]
    UnknownType(u8),
    #[error("unknown tuple marker {0:#04x}")]
    UnknownTuple(u8),
    #[error("unknown column kind {0:#04x}")]
    UnknownColumnKind(u8),
    #[error("an insert carries an unchanged TOAST value")]
    UnchangedToast,
    #[error("a binary value came although text format was asked for")]
    Binary,
    #[error("a name is not UTF-8")]
    NotUtf8,
    #[error("a string has no end")]
    UnterminatedString,
}

/// Decodes one message.
///
/// # Errors
/// [`DecodeError`] for anything that protocol version 1 in text format does not allow.
pub fn decode(bytes: &[u8]) -> Result<Message<'_>, DecodeError> {
    let mut r = Reader(bytes);
    let message = match r.u8()? {
        b'B' => Message::Begin(Begin { commit_lsn: r.lsn()?, commit_time_micros: r.i64()?, xid: r.u32()? }),
        b'C' => {
            r.u8()?; // flags, unused
            Message::Commit(Commit { commit_lsn: r.lsn()?, end_lsn: r.lsn()?, commit_time_micros: r.i64()? })
        }
        b'O' => {
            r.lsn()?;
            r.string()?;
            Message::Origin
        }
        b'R' => Message::Relation(relation(&mut r)?),
        b'Y' => {
            r.u32()?;
            r.string()?;
            r.string()?;
            Message::Type
        }
        b'I' => {
            let relation = r.u32()?;
            expect_tuple(&mut r, b"N")?;
            let new = tuple(&mut r, Unchanged::Refused)?;
            Message::Insert { relation, new }
        }
        b'U' => {
            let relation = r.u32()?;
            if expect_tuple(&mut r, b"KON")? != b'N' {
                tuple(&mut r, Unchanged::Allowed)?;
                expect_tuple(&mut r, b"N")?;
            }
            tuple(&mut r, Unchanged::Allowed)?;
            Message::Update { relation }
        }
        b'D' => {
            let relation = r.u32()?;
            expect_tuple(&mut r, b"KO")?;
            tuple(&mut r, Unchanged::Allowed)?;
            Message::Delete { relation }
        }
        b'T' => {
            let relations = r.u32()?;
            r.u8()?; // CASCADE, RESTART IDENTITY
            let oids_len = (relations as usize).saturating_mul(4);
            r.take(oids_len)?;
            Message::Truncate { relations }
        }
        b'M' => {
            let transactional = r.u8()? & 1 != 0;
            r.lsn()?;
            r.string()?;
            let len = r.u32()? as usize;
            r.take(len)?;
            Message::Logical { transactional }
        }
        other => return Err(DecodeError::UnknownType(other)),
    };
    match r.0.len() {
        0 => Ok(message),
        n => Err(DecodeError::Trailing(n)),
    }
}

fn relation(r: &mut Reader<'_>) -> Result<Relation, DecodeError> {
    let oid = r.u32()?;
    let schema = match r.string()? {
        "" => "pg_catalog", // the protocol's short form
        name => name,
    };
    let name = r.string()?.to_owned();
    r.u8()?; // replica identity
    let count = r.u16()?;
    let mut columns = Vec::new();
    for _ in 0..count {
        r.u8()?; // flags: part of the key
        let name = r.string()?.to_owned();
        let type_oid = r.u32()?;
        r.u32()?; // type modifier
        columns.push(Column { name, type_oid });
    }
    Ok(Relation { oid, schema: schema.to_owned(), name, columns })
}

fn expect_tuple(r: &mut Reader<'_>, allowed: &[u8]) -> Result<u8, DecodeError> {
    let marker = r.u8()?;
    if allowed.contains(&marker) { Ok(marker) } else { Err(DecodeError::UnknownTuple(marker)) }
}

/// Whether a TOAST value may be missing because it has not changed: never in an insert, which always
/// carries its whole row (PostgreSQL manual, "TupleData").
#[derive(Clone, Copy, PartialEq)]
enum Unchanged {
    Allowed,
    Refused,
}

/// Takes a tuple off the reader, checking that every column is well formed.
fn tuple<'a>(r: &mut Reader<'a>, unchanged: Unchanged) -> Result<Tuple<'a>, DecodeError> {
    let columns = r.u16()?;
    let start = r.0;
    for _ in 0..columns {
        match r.u8()? {
            b'n' => {}
            b'u' if unchanged == Unchanged::Allowed => {}
            b'u' => return Err(DecodeError::UnchangedToast),
            b't' => {
                let len = r.u32()? as usize;
                r.take(len)?;
            }
            b'b' => return Err(DecodeError::Binary),
            other => return Err(DecodeError::UnknownColumnKind(other)),
        }
    }
    Ok(Tuple { columns, bytes: &start[..start.len() - r.0.len()] })
}

impl<'a> Tuple<'a> {
    /// Number of columns.
    pub fn len(&self) -> usize {
        usize::from(self.columns)
    }

    pub fn is_empty(&self) -> bool {
        self.columns == 0
    }

    /// The values in column order.
    pub fn values(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut r = Reader(self.bytes);
        (0..self.columns).map(move |_| value(&mut r).expect("checked when the tuple was decoded"))
    }
}

/// A value of an insert.
fn value<'a>(r: &mut Reader<'a>) -> Result<Value<'a>, DecodeError> {
    match r.u8()? {
        b'n' => Ok(Value::Null),
        _ => {
            let len = r.u32()? as usize;
            Ok(Value::Text(r.take(len)?))
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        match self.0.split_at_checked(len) {
            Some((taken, rest)) => {
                self.0 = rest;
                Ok(taken)
            }
            None => Err(DecodeError::Truncated { missing: len - self.0.len() }),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        Ok(self.take(N)?.try_into().expect("take gives N bytes"))
    }

    fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    fn i64(&mut self) -> Result<i64, DecodeError> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    fn lsn(&mut self) -> Result<Lsn, DecodeError> {
        Ok(Lsn::from(u64::from_be_bytes(self.array()?)))
    }

    /// A NUL-terminated name.
    fn string(&mut self) -> Result<&'a str, DecodeError> {
        let end = self.0.iter().position(|&b| b == 0).ok_or(DecodeError::UnterminatedString)?;
        let text = std::str::from_utf8(&self.0[..end]).map_err(|_| DecodeError::NotUtf8)?;
        self.0 = &self.0[end + 1..];
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn insert(columns: &[u8], count: u16) -> Vec<u8> {
        [&b"I"[..], &7u32.to_be_bytes(), b"N", &count.to_be_bytes(), columns].concat()
    }

    fn check(bytes: &[u8], expected: Result<Message<'_>, DecodeError>) {
        assert_eq!(decode(bytes), expected);
    }

    #[test]
    fn an_insert_gives_null_empty_and_text_values() {
        let bytes = insert(b"nt\0\0\0\0t\0\0\0\x02ab", 3);
        let Ok(Message::Insert { relation: 7, new }) = decode(&bytes) else { panic!() };
        let values: Vec<_> = new.values().collect();
        assert_eq!(values, [Value::Null, Value::Text(b""), Value::Text(b"ab")]);
    }

    #[test]
    fn a_lying_length_is_an_error_and_allocates_nothing() {
        let bytes = insert(b"t\xff\xff\xff\xffab", 1);
        check(&bytes, Err(DecodeError::Truncated { missing: 0xffff_ffff - 2 }));
        let truncate = [&b"T"[..], &u32::MAX.to_be_bytes(), b"\0"].concat();
        assert!(matches!(decode(&truncate), Err(DecodeError::Truncated { .. })));
    }

    #[test]
    fn an_unchanged_toast_value_in_an_insert_is_an_error() {
        check(&insert(b"u", 1), Err(DecodeError::UnchangedToast));
    }

    #[test]
    fn binary_values_unknown_kinds_and_trailing_bytes_are_errors() {
        check(&insert(b"b\0\0\0\0", 1), Err(DecodeError::Binary));
        check(&insert(b"x", 1), Err(DecodeError::UnknownColumnKind(b'x')));
        check(&insert(b"nn", 1), Err(DecodeError::Trailing(1)));
        check(b"S\0\0\0\0", Err(DecodeError::UnknownType(b'S')));
        check(b"", Err(DecodeError::Truncated { missing: 1 }));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        #[test]
        fn any_bytes_decode_or_fail_without_panic(
            tag in proptest::sample::select(b"BCORYIUDTMSE".to_vec()),
            rest in proptest::collection::vec(any::<u8>(), 0..80),
        ) {
            let mut bytes = vec![tag];
            bytes.extend(rest);
            if let Ok(Message::Insert { new, .. }) = decode(&bytes) {
                prop_assert_eq!(new.values().count(), new.len());
            }
        }
    }
}
