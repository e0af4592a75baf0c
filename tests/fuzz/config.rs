//! Any file, and any environment (in lines `#!NAME=VALUE`), is a configuration or a mistake told in
//! one line that names the place. The line does not depend on a password: with another one it is the
//! same.

use outbox_tailer::config::{Config, Overrides, parse};
use outbox_tailer::error::{Kind, Result};
use toml::{Table, Value};

/// Stands for a password, and becomes each of two others.
const PASSWORD: &str = "S3cr3t";
const OTHERS: [&str; 2] = ["pa55word", "k3yphr4s"];

pub fn check(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = line(&load(text, |_, value| value));
    let secret = ["password", "sasl_password", "url"];
    let lines = OTHERS.map(|other| line(&replaced(text, &secret, other)));
    assert_eq!(lines[0], lines[1], "a password shows");
    // A configuration may show its URL, which hides the password by itself.
    let shown =
        OTHERS.map(|other| replaced(text, &secret[..2], other).ok().map(|config| format!("{config:?}")));
    assert_eq!(shown[0], shown[1], "a password shows");
}

fn load(text: &str, env: impl Fn(&str, String) -> String) -> Result<Config> {
    let variables = text.lines().filter_map(|line| line.strip_prefix("#!")?.split_once('='));
    let env = variables.map(|(name, value)| (name.to_owned(), env(name, value.to_owned())));
    parse(Some(text), "c.toml".to_owned(), env, &Overrides::default())
}

fn line(config: &Result<Config>) -> Option<String> {
    let error = config.as_ref().err()?;
    let line = error.line();
    assert_eq!(error.kind, Kind::Mistake, "{line}");
    assert!(!line.chars().any(char::is_control), "{line:?}");
    let places = ["postgres", "kafka", "witness", "worker", "outbox", "OUTBOX_TAILER_", "c.toml, line "];
    assert!(places.iter().any(|place| line.contains(place)), "names no place: {line:?}");
    Some(line)
}

/// Loads the text with another password under these keys; everywhere, when it is no TOML.
fn replaced(text: &str, keys: &[&str], other: &str) -> Result<Config> {
    let env = |name: &str, value: String| {
        let secret = keys.iter().any(|key| name.ends_with(&key.to_uppercase()));
        if secret { value.replace(PASSWORD, other) } else { value }
    };
    let Ok(mut table) = text.parse::<Table>() else { return load(&text.replace(PASSWORD, other), env) };
    for section in ["postgres", "kafka"] {
        if let Some(Value::Table(section)) = table.get_mut(section) {
            for (_, value) in section.iter_mut().filter(|(key, _)| keys.contains(&key.as_str())) {
                replace(value, other);
            }
        }
    }
    let variables: String =
        text.lines().filter(|line| line.starts_with("#!")).flat_map(|l| [l, "\n"]).collect();
    let table = toml::to_string(&table).expect("what was read can be written");
    load(&format!("{variables}{table}"), env)
}

/// A password may stand in quotes, or not, or too deep.
fn replace(value: &mut Value, other: &str) {
    match value {
        Value::String(text) => *text = text.replace(PASSWORD, other),
        Value::Integer(number) => *number = i64::from(other.as_bytes()[0]),
        Value::Array(values) => values.iter_mut().for_each(|value| replace(value, other)),
        Value::Table(table) => table.iter_mut().for_each(|(_, value)| replace(value, other)),
        _ => {}
    }
}
