//! The bytes of a replication stream, in whatever pieces they come, give what they give at once, and
//! that is what cutting them by hand gives.
//!
//! The first byte of the input says how many pieces there are, the next ones how long they are.

use bytes::BytesMut;
use outbox_tailer::error::Kind;
use outbox_tailer::relay::Lsn;
use outbox_tailer::source::{Received, take};

pub fn check(input: &[u8]) {
    let Some((&pieces, rest)) = input.split_first() else { return };
    let Some((lengths, stream)) = rest.split_at_checked(usize::from(pieces)) else { return };
    let mut buffer = BytesMut::new();
    let mut received = Vec::new();
    let mut ended = None;
    let mut left = stream;
    for length in lengths.iter().map(|length| usize::from(*length)).chain([usize::MAX]) {
        let (piece, rest) = left.split_at(length.min(left.len()));
        left = rest;
        buffer.extend_from_slice(piece);
        if ended.is_none() {
            ended = take_all(&mut buffer, &mut received);
        }
    }
    let (mut whole, mut at_once) = (BytesMut::from(stream), Vec::new());
    let end = take_all(&mut whole, &mut at_once);
    assert_eq!(received, at_once);
    assert_eq!(ended, end);
    assert!(ended.is_some() || buffer == whole, "the rest is kept");
    by_hand(stream, &received, ended.as_deref());
}

/// What there is; the error that ends the stream, as it is told.
fn take_all(buffer: &mut BytesMut, received: &mut Vec<Received>) -> Option<String> {
    loop {
        let before = buffer.len();
        match take(buffer) {
            Ok(Some(message)) => received.push(message),
            Ok(None) => return None,
            Err(error) => {
                let line = error.line();
                assert!(matches!(error.kind, Kind::Wait | Kind::Mistake | Kind::Refusal(_)), "{line}");
                assert!(!line.chars().any(char::is_control), "{line:?}");
                return Some(line);
            }
        }
        assert!(buffer.len() < before, "no message without bytes");
    }
}

/// PostgreSQL manual, "Message Formats" and "Streaming Replication Protocol".
fn by_hand(stream: &[u8], received: &[Received], ended: Option<&str>) {
    let (mut rest, mut received) = (stream, received.iter());
    let u64_at = |body: &[u8], at: usize| u64::from_be_bytes(body[at..at + 8].try_into().expect("eight"));
    while rest.len() >= 5 {
        let len = u32::from_be_bytes(rest[1..5].try_into().expect("four")) as usize;
        if !(4..=1 << 30).contains(&len) {
            assert!(ended.is_some_and(|line| line.contains("impossible length")), "{ended:?}");
            break;
        }
        let Some(body) = rest.get(5..1 + len) else { break };
        let tag = rest[0];
        rest = &rest[1 + len..];
        match (tag, body.first()) {
            (b'S', _) => {}
            (b'd', Some(b'w')) if body.len() >= 25 => {
                let Some(Received::Wal { lsn, data }) = received.next() else { panic!("no WAL") };
                assert_eq!((*lsn, &data[..]), (Lsn::from(u64_at(body, 1)), &body[25..]));
            }
            (b'd', Some(b'k')) if body.len() >= 18 => {
                let Some(Received::Keepalive { wal_end, reply_requested }) = received.next() else {
                    panic!("no keepalive")
                };
                assert_eq!((*wal_end, *reply_requested), (Lsn::from(u64_at(body, 1)), body[17] != 0));
            }
            (b'N', _) => {
                let Some(Received::Notice { .. }) = received.next() else { panic!("no notice") };
            }
            _ => {
                assert!(ended.is_some(), "{:?} goes by", char::from(tag));
                break;
            }
        }
    }
    assert_eq!(received.next(), None);
}
