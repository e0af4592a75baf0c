//! What the fuzzer starts from: what PostgreSQL 14 to 18 sent, the README's configuration, and the
//! documents that the worker writes.

const CAPTURES: [&str; 5] = [
    include_str!("../golden/pgoutput-14.txt"),
    include_str!("../golden/pgoutput-15.txt"),
    include_str!("../golden/pgoutput-16.txt"),
    include_str!("../golden/pgoutput-17.txt"),
    include_str!("../golden/pgoutput-18.txt"),
];

pub fn none() -> Vec<Vec<u8>> {
    Vec::new()
}

pub fn messages() -> Vec<Vec<u8>> {
    CAPTURES.iter().flat_map(|file| capture(file)).collect()
}

fn capture(file: &str) -> Vec<Vec<u8>> {
    let hex = |text: &str| {
        (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
    };
    file.lines().filter(|l| !l.starts_with('#')).map(|l| hex(l.rsplit(' ').next().unwrap())).collect()
}

#[cfg(feature = "worker")]
pub use worker::*;

#[cfg(feature = "worker")]
mod worker {
    use super::{CAPTURES, capture};

    /// Each capture as a stream in one piece, with a keepalive, a notice and an end.
    pub fn streams() -> Vec<Vec<u8>> {
        let message =
            |tag: u8, body: &[u8]| [&[tag][..], &(body.len() as u32 + 4).to_be_bytes(), body].concat();
        let fields = |severity: &str, code: &str| {
            format!("S{severity}\0V{severity}\0C{code}\0Msome text\0Dmore of it\0\0").into_bytes()
        };
        let stream = |file: &str| {
            let mut stream = vec![3, 1, 7, 250];
            stream.extend(message(b'S', b"TimeZone\0UTC\0"));
            for (i, wal) in capture(file).iter().enumerate().take(40) {
                let place = (1_000 + i as u64).to_be_bytes();
                stream.extend(message(b'd', &[&b"w"[..], &place, &place, &[0; 8], wal].concat()));
            }
            stream.extend(message(b'd', &[&b"k"[..], &2_000u64.to_be_bytes(), &[0; 8], b"\x01"].concat()));
            stream.extend(message(b'N', &fields("WARNING", "55000")));
            stream
        };
        let mut streams: Vec<_> = CAPTURES.iter().map(|file| stream(file)).collect();
        for code in ["42704", "55000", "57P01", "08P01", "XX000"] {
            streams.push([vec![0], message(b'E', &fields("ERROR", code))].concat());
        }
        streams.push([vec![0], message(b'c', b"")].concat());
        streams
    }

    /// The README's examples, and one mistake each.
    pub fn configurations() -> Vec<Vec<u8>> {
        let readme = include_str!("../../README.md");
        let examples = readme.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
        let base = "[postgres]\nurl = 'postgres://u:S3cr3t@h/db'\n[kafka]\nbrokers = 'b:1'\n";
        let mut texts: Vec<String> = examples.map(str::to_owned).collect();
        texts.push(base.to_owned());
        for more in [
            "sasl_password = 'S3cr3t'\n",
            "sasl_password = 1234\n",
            "properties = { 'linger.ms' = 5, 'max.in.flight' = 6, 'ssl.key.password' = 'x' }\n",
            "properties = { 'sasl.password' = 'x' }\n",
            "[postgress]\n",
            "[[outbox]]\ntable = 'a.\"b.c\"\"d\"'\npreset = 'debezium'\ntopic = 't'\npayload = ['a', 'b']\n",
            "[[outbox]]\ntable = 'o'\nheaders = [ { name = 'id', column = 'x' } ]\ntimestamp = 'commit'\n",
            "[witness]\nkind = 'file'\nfile = '/w.json'\n[worker]\nwindow_events = 0\nexit_on_refusal = true\n",
            "[witness]\nkind = 'none'\ntopic = 't'\n",
            "#!OUTBOX_TAILER_POSTGRES_URL=host=h,i port=1 user=u dbname=db sslmode=require password='S3\\'S3cr3t'\n",
            "#!OUTBOX_TAILER_POSTGRES_PASSWORD=S3cr3t\n#!OUTBOX_TAILER_POSTGRES_SLOTT=x\n",
            "#!OUTBOX_TAILER_KAFKA_PROPERTIES={ 'a' = 1 }\n#!OUTBOX_TAILER_WORKER_WINDOW_BYTES=x\n",
            "#!OUTBOX_TAILER_OUTBOX=[ { table = 't' } ]\n#!OUTBOX_TAILER_POSTGRES_TLS_MODE=verify-ca\n",
        ] {
            texts.push(format!("{base}{more}"));
        }
        for url in [
            "postgres://u:S3cr3t@h:5432,i/db?sslmode=verify-full&sslrootcert=%2Fca&application_name=x",
            "postgresql://u:S3cr3t%zz@h:port/db",
            "postgres://u:p@S3cr3t@h/db?sslkey=%2",
            "host=h user=u password=S3cr3t hostaddr=1.2.3.4",
            "host=h user=u sslmode=disabled password = 'S3cr3t'",
        ] {
            texts.push(base.replace("postgres://u:S3cr3t@h/db", url));
        }
        texts.into_iter().map(String::into_bytes).collect()
    }

    pub fn documents() -> Vec<Vec<u8>> {
        let record = |lsn: &str| {
            format!(
                r#"{{"slot":"s","system_identifier":"7","timeline":3,"history":[[1,"0/16B3748"],[2,"1/0"]],"position":"{lsn}","epoch":5,"instance":"host:1"}}"#
            )
        };
        let descriptor = |xmin: u32, leaf: &str| {
            format!(
                r#"{{"publication":{{"oid":1,"xmin":"{xmin}","insert":true,"update":false,"delete":false,"truncate":false,"via_root":true,"all_tables":false}},"tables":{{"public.o":{{"oid":3,"kind":"p","persistence":"p","member":{{"oid":2,"xmin":"700","filter":null,"columns":null}},"children":false,"child":false}}}},"leaves":{{"public.o/{leaf}":{{"kind":"r","persistence":"p","xmin":"690"}}}}}}"#
            )
        };
        let halves = [
            [record("2/A"), record("2/B")],
            [record("2/A"), String::new()],
            [descriptor(700, "4"), descriptor(700, "5")],
            [descriptor(700, "4"), descriptor(701, "4")],
        ];
        let mut documents: Vec<Vec<u8>> = Vec::new();
        for [one, other] in halves {
            documents.push([&[0], one.as_bytes()].concat());
            // Both are made of one length, with spaces.
            let width = one.len().max(other.len());
            documents.push([vec![128], format!("{one:width$}{other:width$}").into_bytes()].concat());
        }
        documents
    }
}
