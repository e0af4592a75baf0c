//! Relation + tuple → [`OutboxEvent`], by the configured mapping.
//!
//! A table is known by its OID (a rename must not make its rows invisible), a column by its name
//! in the latest Relation message (positions shift when a column is dropped).

use super::pgoutput::{Relation, Tuple, Value};

/// How the rows of one outbox table become events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    pub schema: String,
    pub table: String,
    /// OID of the table that the publication held when it was described.
    pub oid: u32,
    pub id: ColumnName,
    pub key: ColumnName,
    pub payload: ColumnName,
    /// In the order in which they go into the record.
    pub headers: Vec<(String, ColumnName)>,
}

/// The names that a column may have, best first: a rename under a backlog needs both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnName(pub Vec<String>);

impl ColumnName {
    pub fn new(name: &str) -> Self {
        ColumnName(vec![name.to_owned()])
    }
}

impl std::fmt::Display for ColumnName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.0.first().map_or("", String::as_str))?;
        self.0.iter().skip(1).try_for_each(|name| write!(f, " or {name:?}"))
    }
}

/// One row of an outbox table, borrowed from the message it came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutboxEvent<'a> {
    pub id: Option<&'a [u8]>,
    pub key: Option<&'a [u8]>,
    pub payload: Option<&'a [u8]>,
    /// As in [`Mapping::headers`], with room for one more.
    pub headers: Vec<(&'a str, Option<&'a [u8]>)>,
}

/// A mapping bound to the columns of one Relation message.
#[derive(Debug, Clone)]
pub struct Binding {
    /// What each column of the tuple is for.
    roles: Vec<Role>,
    /// Position of each header's column; two headers may share one.
    headers: Vec<usize>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Role {
    id: bool,
    key: bool,
    payload: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    #[error("the table has no column {0}")]
    NoColumn(ColumnName),
    #[error("column {0:?} is bytea, which cannot be published yet")]
    Bytea(String),
}

/// `pg_type.dat`: bytea.
const BYTEA_OID: u32 = 17;

impl Binding {
    /// # Errors
    /// [`BindError`] when a configured column is missing or of a type that has no text.
    pub fn new(mapping: &Mapping, relation: &Relation) -> Result<Self, BindError> {
        let find = |column: &ColumnName| {
            let position = |name: &String| relation.columns.iter().position(|c| c.name == *name);
            let at = column.0.iter().find_map(position).ok_or_else(|| BindError::NoColumn(column.clone()))?;
            match relation.columns[at].type_oid {
                BYTEA_OID => Err(BindError::Bytea(relation.columns[at].name.clone())),
                _ => Ok(at),
            }
        };
        let mut roles = vec![Role::default(); relation.columns.len()];
        roles[find(&mapping.id)?].id = true;
        roles[find(&mapping.key)?].key = true;
        roles[find(&mapping.payload)?].payload = true;
        let headers = mapping.headers.iter().map(|(_, column)| find(column)).collect::<Result<_, _>>()?;
        Ok(Binding { roles, headers })
    }

    /// Picks the event out of a row, with the mapping that the binding was made of; `None` when the row has another number of columns than the
    /// Relation message told.
    pub fn event<'a>(&self, mapping: &'a Mapping, tuple: &Tuple<'a>) -> Option<OutboxEvent<'a>> {
        if tuple.len() != self.roles.len() {
            return None;
        }
        let mut headers = Vec::with_capacity(mapping.headers.len() + 1);
        headers.extend(mapping.headers.iter().map(|(name, _)| (name.as_str(), None)));
        let mut event = OutboxEvent { id: None, key: None, payload: None, headers };
        for (at, (value, role)) in tuple.values().zip(&self.roles).enumerate() {
            let Value::Text(text) = value else { continue };
            if role.id {
                event.id = Some(text);
            }
            if role.key {
                event.key = Some(text);
            }
            if role.payload {
                event.payload = Some(text);
            }
            for ((_, header), &column) in event.headers.iter_mut().zip(&self.headers) {
                if column == at {
                    *header = Some(text);
                }
            }
        }
        Some(event)
    }
}
