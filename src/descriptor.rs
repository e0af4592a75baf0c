//! What the publication and its tables are, in enough detail to notice that they were changed, or
//! changed and changed back, between two looks.
//!
//! pgoutput reads the catalogs as they were when a row was written. A publication that did not
//! hold the table for a moment leaves rows out of the stream for good, on PostgreSQL 18 with a mere
//! warning. OIDs alone miss a change that is undone before the next look; the `xmin` of the catalog
//! rows does not.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::TableConfig;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    pub publication: Option<Publication>,
    /// By configured name.
    pub tables: BTreeMap<String, Option<Table>>,
    /// Partitions at every level, by "table/OID". Kept when one is detached: its return is noticed.
    pub leaves: BTreeMap<String, Leaf>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publication {
    pub oid: u32,
    pub xmin: String,
    pub insert: bool,
    pub update: bool,
    pub delete: bool,
    pub truncate: bool,
    pub via_root: bool,
    pub all_tables: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    pub oid: u32,
    /// `relkind`: r, or p for a partitioned table.
    pub kind: String,
    /// `relpersistence`: only p (permanent) is in the WAL.
    pub persistence: String,
    pub member: Option<Member>,
    /// Has children by INHERITS, which are published under their own names.
    pub children: bool,
    /// Is a partition or a child itself: its rows may come under the name of the root.
    pub child: bool,
}

/// The table's row in `pg_publication_rel`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub oid: u32,
    pub xmin: String,
    /// Has a row filter (PostgreSQL 15).
    pub filter: Option<String>,
    /// Has a column list (PostgreSQL 15).
    pub columns: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaf {
    /// `relkind`: r, or p for one that is partitioned itself. A foreign table is not in the WAL.
    pub kind: String,
    pub persistence: String,
    /// Of its row in `pg_inherits`: another one after a re-attach.
    pub xmin: String,
}

/// An expression that gives the descriptor as jsonb. Parameters: `$1` publication (text), `$2`
/// schemas and `$3` tables (text arrays of one length).
///
/// Only catalogs are read, so any role may run it. `to_jsonb(row)` reads the columns that
/// PostgreSQL 14 does not have yet.
pub const DESCRIPTOR_SQL: &str = "
jsonb_build_object(
  'publication', (
    SELECT jsonb_build_object('oid', p.oid::bigint, 'xmin', p.xmin::text, 'insert', p.pubinsert,
             'update', p.pubupdate, 'delete', p.pubdelete, 'truncate', p.pubtruncate,
             'via_root', p.pubviaroot, 'all_tables', p.puballtables)
    FROM pg_publication p WHERE p.pubname = $1::text),
  'tables', (
    SELECT jsonb_object_agg(w.schema || '.' || w.name,
      CASE WHEN c.oid IS NOT NULL THEN
        jsonb_build_object('oid', c.oid::bigint, 'kind', c.relkind, 'persistence', c.relpersistence,
          'children', c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid),
          'child', EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid),
          'member', (SELECT jsonb_build_object('oid', r.oid::bigint, 'xmin', r.xmin::text,
                              'filter', to_jsonb(r)->>'prqual', 'columns', to_jsonb(r)->>'prattrs')
                     FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                     WHERE p.pubname = $1::text AND r.prrelid = c.oid)) END)
    FROM unnest($2::text[], $3::text[]) AS w(schema, name)
    LEFT JOIN (pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace)
           ON n.nspname = w.schema AND c.relname = w.name),
  'leaves', (
    WITH RECURSIVE tree AS (
      SELECT w.schema || '.' || w.name AS root, i.inhrelid, i.xmin::text AS xmin
      FROM unnest($2::text[], $3::text[]) AS w(schema, name)
      JOIN pg_namespace n ON n.nspname = w.schema
      JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = w.name AND c.relkind = 'p'
      JOIN pg_inherits i ON i.inhparent = c.oid AND NOT i.inhdetachpending
      UNION ALL
      SELECT tree.root, i.inhrelid, i.xmin::text
      FROM tree JOIN pg_inherits i ON i.inhparent = tree.inhrelid AND NOT i.inhdetachpending)
    SELECT coalesce(jsonb_object_agg(tree.root || '/' || tree.inhrelid,
             jsonb_build_object('kind', c.relkind, 'persistence', c.relpersistence, 'xmin', tree.xmin)), '{}')
    FROM tree JOIN pg_class c ON c.oid = tree.inhrelid))";

/// Whether a change of the publication, of its tables' membership or of their partitions is still
/// under way: its commit may wait for synchronous replication, decoded already and not visible yet.
///
/// Such a change has put its transaction into the `xmax` of the rows it replaces; a lock on the
/// publication is not enough to go by, because `ALTER PUBLICATION ... SET (...)` takes none.
/// Parameters as for [`DESCRIPTOR_SQL`]. Must be a statement of its own, before the comparison.
pub const IN_FLIGHT_SQL: &str = "
WITH RECURSIVE horizon AS (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next),
wanted AS (
  SELECT c.oid FROM unnest($2::text[], $3::text[]) AS w(schema, name)
  JOIN pg_namespace n ON n.nspname = w.schema
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = w.name),
tree AS (
  SELECT i.inhrelid, i.xmax FROM wanted JOIN pg_inherits i ON i.inhparent = wanted.oid
  UNION ALL
  SELECT i.inhrelid, i.xmax FROM tree JOIN pg_inherits i ON i.inhparent = tree.inhrelid),
touched AS (
  SELECT p.xmax::text::bigint AS xid FROM pg_publication p WHERE p.pubname = $1::text
  UNION ALL
  SELECT r.xmax::text::bigint FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
  WHERE p.pubname = $1::text
  UNION ALL
  SELECT tree.xmax::text::bigint FROM tree),
widened AS (
  -- 32 bits to 64: the nearest to the next one. A running transaction may be newer than that, which
  -- is one after the newest that has ended.
  SELECT next + (xid - (next & 4294967295) + 6442450944) % 4294967296 - 2147483648 AS xid
  FROM touched, horizon WHERE xid <> 0)
SELECT EXISTS (SELECT FROM widened WHERE xid > 0 AND pg_xact_status(xid::text::xid8) = 'in progress')";

/// What `now` differs in from what was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    None,
    /// Partitions made since: accepted, and announced.
    NewLeaves(BTreeMap<String, Leaf>),
    /// Rows may have been left out of the stream.
    Changed(String),
}

impl Descriptor {
    /// Compares what was accepted with what is there now.
    pub fn difference(&self, now: &Descriptor, publication: &str) -> Difference {
        if let Some(change) =
            self.publication_change(now, publication).or_else(|| self.table_change(now, publication))
        {
            return Difference::Changed(change);
        }
        let mut new = BTreeMap::new();
        for (leaf, found) in &now.leaves {
            match self.leaves.get(leaf) {
                _ if !found.is_logged() => {
                    return Difference::Changed(format!(
                        "partition {leaf} is not logged, its rows are not in the stream"
                    ));
                }
                Some(accepted) if accepted == found => {}
                Some(_) => {
                    return Difference::Changed(format!(
                        "partition {leaf} was detached and attached again; what was written to it between is not in the stream"
                    ));
                }
                None => {
                    new.insert(leaf.clone(), found.clone());
                }
            }
        }
        if new.is_empty() { Difference::None } else { Difference::NewLeaves(new) }
    }

    fn publication_change(&self, now: &Descriptor, name: &str) -> Option<String> {
        match (&self.publication, &now.publication) {
            (_, None) => Some(format!("publication {name} does not exist any more")),
            (Some(was), Some(is)) if was.oid != is.oid => {
                Some(format!("publication {name} was dropped and made again"))
            }
            (Some(was), Some(is)) if was.xmin != is.xmin => {
                Some(format!("publication {name} was altered (it publishes {} now)", is.operations()))
            }
            (was, is) if was != is => Some(format!("publication {name} is not the one that was accepted")),
            _ => None,
        }
    }

    fn table_change(&self, now: &Descriptor, publication: &str) -> Option<String> {
        for (name, was) in &self.tables {
            let Some(is) = now.tables.get(name) else {
                return Some(format!(
                    "table {name} is published but not in this worker's configuration (was it added by `init`?)"
                ));
            };
            let (Some(was), Some(is)) = (was, is) else {
                return Some(format!("table {name} does not exist any more"));
            };
            if was.oid != is.oid {
                return Some(format!("{name} is another table now (OID {}, it was {})", is.oid, was.oid));
            }
            if let Some(problem) = is.unsuitable(name) {
                return Some(problem);
            }
            match (&was.member, &is.member) {
                (Some(_), None) => {
                    return Some(format!("table {name} was taken out of publication {publication}"));
                }
                (Some(was), Some(is)) if was.oid != is.oid => {
                    return Some(format!(
                        "table {name} was taken out of publication {publication} and put in again"
                    ));
                }
                (was, is) if was != is => {
                    return Some(format!(
                        "the row filter or column list of table {name} in publication {publication} was changed"
                    ));
                }
                _ => {}
            }
        }
        let added = now.tables.keys().find(|name| !self.tables.contains_key(*name));
        added.map(|name| {
            format!("table {name} is configured but not part of what `init` set up; run `init` again")
        })
    }

    /// Why this is not a set-up the worker can rely on; `None` when it is.
    pub fn unsuitable(&self, publication: &str) -> Option<String> {
        let Some(p) = &self.publication else {
            return Some(format!("publication {publication} does not exist"));
        };
        if !p.insert {
            return Some(format!(
                "publication {publication} does not publish inserts (it publishes {})",
                p.operations()
            ));
        }
        for (name, table) in &self.tables {
            let Some(table) = table else { return Some(format!("table {name} does not exist")) };
            if let Some(problem) = table.unsuitable(name) {
                return Some(problem);
            }
            match &table.member {
                None if !p.all_tables => {
                    return Some(format!("table {name} is not in publication {publication}"));
                }
                Some(Member { filter: Some(_), .. }) => {
                    return Some(format!(
                        "publication {publication} has a row filter on {name}: rows outside it would never come"
                    ));
                }
                Some(Member { columns: Some(_), .. }) => {
                    return Some(format!(
                        "publication {publication} has a column list on {name}: a column may be missing from the stream"
                    ));
                }
                _ => {}
            }
            if table.kind == "p" && !p.via_root {
                return Some(format!(
                    "publication {publication} sends the rows of the partitioned table {name} under its partitions' names: ALTER PUBLICATION ... SET (publish_via_partition_root = true)"
                ));
            }
        }
        let unlogged = self.leaves.iter().find(|(_, leaf)| !leaf.is_logged());
        unlogged.map(|(name, _)| format!("partition {name} is not logged, its rows are not in the stream"))
    }

    /// What a publication made by others sends besides what is needed.
    pub fn excess(&self) -> Option<String> {
        let p = self.publication.as_ref()?;
        let operations = p.update || p.delete || p.truncate;
        match (p.all_tables, operations) {
            (true, _) => Some("it publishes every table of the database".to_owned()),
            (false, true) => Some(format!("it publishes {}, only inserts are needed", p.operations())),
            _ => None,
        }
    }

    pub fn table(&self, name: &str) -> Option<&Table> {
        self.tables.get(name)?.as_ref()
    }
}

impl Publication {
    fn operations(&self) -> String {
        let all = [
            ("insert", self.insert),
            ("update", self.update),
            ("delete", self.delete),
            ("truncate", self.truncate),
        ];
        let names: Vec<&str> = all.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect();
        if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
    }
}

impl Leaf {
    fn is_logged(&self) -> bool {
        matches!(self.kind.as_str(), "r" | "p") && self.persistence == "p"
    }
}

impl Table {
    pub fn unsuitable(&self, name: &str) -> Option<String> {
        match (self.kind.as_str(), self.persistence.as_str()) {
            ("r", "p") if self.children => Some(format!(
                "table {name} has child tables (INHERITS), whose rows come under their own names and would be missed: publish them as outbox tables of their own, or make {name} a partitioned table"
            )),
            ("r" | "p", "p") if self.child => Some(format!(
                "table {name} is a partition or child of another table, under whose name its rows may come: configure that one"
            )),
            ("r" | "p", "p") => None,
            ("r" | "p", _) => Some(format!(
                "table {name} is not logged (UNLOGGED or temporary), its rows are not in the WAL"
            )),
            _ => Some(format!("{name} is not a table (relkind {})", self.kind)),
        }
    }
}

/// The parameters of [`DESCRIPTOR_SQL`] after the publication.
pub fn table_parameters(tables: &[TableConfig]) -> (Vec<String>, Vec<String>) {
    tables.iter().map(|t| (t.schema.clone(), t.table.clone())).unzip()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor() -> Descriptor {
        let publication = Publication {
            oid: 1,
            xmin: "700".into(),
            insert: true,
            update: false,
            delete: false,
            truncate: false,
            via_root: true,
            all_tables: false,
        };
        let member = Member { oid: 2, xmin: "700".into(), filter: None, columns: None };
        let table = Table {
            oid: 3,
            kind: "p".into(),
            persistence: "p".into(),
            member: Some(member),
            children: false,
            child: false,
        };
        let leaf = Leaf { kind: "r".into(), persistence: "p".into(), xmin: "690".into() };
        Descriptor {
            publication: Some(publication),
            tables: [("public.o".to_owned(), Some(table))].into(),
            leaves: [("public.o/4".to_owned(), leaf)].into(),
        }
    }

    fn changed(edit: impl FnOnce(&mut Descriptor)) -> Difference {
        let mut now = descriptor();
        edit(&mut now);
        descriptor().difference(&now, "p")
    }

    fn check(edit: impl FnOnce(&mut Descriptor), says: &str) {
        match changed(edit) {
            Difference::Changed(what) => assert!(what.contains(says), "{what}"),
            other => panic!("{other:?} instead of {says:?}"),
        }
    }

    #[test]
    fn every_change_that_may_have_left_rows_out_is_named() {
        assert_eq!(changed(|_| {}), Difference::None);
        check(|d| d.publication = None, "does not exist any more");
        check(|d| d.publication.as_mut().unwrap().oid = 9, "dropped and made again");
        check(|d| d.publication.as_mut().unwrap().xmin = "701".into(), "was altered");
        let member = |d: &mut Descriptor, m: Option<Member>| {
            d.tables.get_mut("public.o").unwrap().as_mut().unwrap().member = m
        };
        check(|d| member(d, None), "taken out of publication");
        let again = Member { oid: 5, xmin: "701".into(), filter: None, columns: None };
        check(|d| member(d, Some(again)), "put in again");
        let filtered = Member { oid: 2, xmin: "701".into(), filter: Some("x".into()), columns: None };
        check(|d| member(d, Some(filtered)), "row filter");
        check(|d| d.tables.get_mut("public.o").unwrap().as_mut().unwrap().oid = 8, "another table now");
        check(|d| *d.tables.get_mut("public.o").unwrap() = None, "does not exist any more");
        check(|d| drop(d.tables.insert("public.new".into(), None)), "is configured but not");
        check(|d| d.tables.clear(), "not in this worker's configuration");
        check(|d| d.leaves.get_mut("public.o/4").unwrap().xmin = "702".into(), "attached again");
        check(|d| d.leaves.get_mut("public.o/4").unwrap().persistence = "u".into(), "not logged");
    }

    #[test]
    fn new_partitions_are_accepted_and_gone_ones_are_no_change() {
        let leaf = Leaf { kind: "r".into(), persistence: "p".into(), xmin: "705".into() };
        let new = leaf.clone();
        assert_eq!(
            changed(|d| drop(d.leaves.insert("public.o/9".into(), new))),
            Difference::NewLeaves([("public.o/9".to_owned(), leaf)].into())
        );
        assert_eq!(changed(|d| d.leaves.clear()), Difference::None);
    }
}
