//! What can go wrong, by what the operator can do about it.

use std::fmt;

use crate::startcheck::NoStart;

/// An error that ends a command or a session of the worker.
#[derive(Debug)]
pub struct Error {
    pub kind: Kind,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
    /// What a command needs to clear it, for the position row.
    pub detail: serde_json::Value,
}

/// What follows from an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The operator gave something wrong: a command ends with exit code 2 and has changed nothing.
    Mistake,
    /// Not there yet, or gone for the moment: the worker tries again by itself.
    Wait,
    /// History may be lost or an event cannot be published: the worker publishes nothing until an
    /// operator's command clears it.
    Refusal(Refusal),
    /// A bug of ours.
    Bug,
}

/// The reasons for a refusal, as logs and the position row name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The slot confirms more than was persisted, or is lost, or one of slot and position is gone.
    Gap,
    /// Another server, a copy, or a history that does not hold what was published.
    Identity,
    /// The publication or an outbox table is not what it was.
    Publication,
    /// A configured column is missing, or is of a type that cannot be published.
    Columns,
    /// One event can never be published as it is.
    Poison,
    /// Another Kafka cluster than the recorded one.
    Kafka,
    /// The worker's tables were made by a newer version.
    Schema,
}

impl Refusal {
    pub fn name(self) -> &'static str {
        match self {
            Refusal::Gap => "gap",
            Refusal::Identity => "identity",
            Refusal::Publication => "publication",
            Refusal::Columns => "columns",
            Refusal::Poison => "poison",
            Refusal::Kafka => "kafka",
            Refusal::Schema => "schema",
        }
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into(), source: None, detail: serde_json::Value::Null }
    }

    pub fn mistake(message: impl Into<String>) -> Self {
        Self::new(Kind::Mistake, message)
    }

    pub fn wait(message: impl Into<String>) -> Self {
        Self::new(Kind::Wait, message)
    }

    pub fn refusal(refusal: Refusal, message: impl Into<String>) -> Self {
        Self::new(Kind::Refusal(refusal), message)
    }

    /// A refusal that no later look would find again: it outlives the process.
    pub fn lasting(refusal: Refusal, message: impl Into<String>) -> Self {
        Self::refusal(refusal, message).with_detail(serde_json::json!({ "lasting": true }))
    }

    pub fn bug(message: impl Into<String>) -> Self {
        Self::new(Kind::Bug, message)
    }

    pub fn no_start(why: NoStart) -> Self {
        match why {
            NoStart::NotSetUp(text) => Error::mistake(text),
            NoStart::NotYet(text) => Error::wait(text),
            NoStart::Gap(text) | NoStart::Ahead(text) => Error::refusal(Refusal::Gap, text),
            NoStart::ByHand(text) => Error::lasting(Refusal::Gap, text),
            NoStart::Identity(text) => Error::refusal(Refusal::Identity, text),
        }
    }

    pub fn because(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    pub fn with_detail(mut self, detail: serde_json::Value) -> Self {
        self.detail = detail;
        self
    }

    /// The whole chain on one line, without line breaks and other controls from servers and files.
    pub fn line(&self) -> String {
        let mut line = self.message.clone();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            let text = cause.to_string();
            // tokio-postgres says "db error" and tells the rest in the source.
            if !line.ends_with(&text) {
                line.push_str(": ");
                line.push_str(&text);
            }
            source = cause.source();
        }
        let parts = line.split(['\n', '\r']).map(str::trim).filter(|part| !part.is_empty());
        parts.collect::<Vec<_>>().join("; ").replace(char::is_control, " ")
    }

    /// Process exit codes, documented in the README.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::Bug => 1,
            Kind::Mistake => 2,
            Kind::Refusal(_) => 3,
            Kind::Wait => 4,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
