-- The fixed transactions behind pgoutput-NN.txt (see the end for what they hold).
-- Run once, in autocommit, on a fresh database by capture.sh. The numbers count
-- the transactions sent by PostgreSQL 15 and later; 14 also sends an empty one
-- where a committed transaction changed nothing published.
\set ON_ERROR_STOP on
\set QUIET on
\pset format unaligned
\o /dev/null
SET client_min_messages = warning;

-- ---------------------------------------------------------------- definitions
CREATE TABLE outbox_event (
    event_id uuid PRIMARY KEY,
    order_id bigint NOT NULL,
    revision bigint NOT NULL,
    event_type text NOT NULL,
    payload jsonb
);

CREATE TYPE "état" AS ENUM ('ouvert', 'fermé');
CREATE DOMAIN courriel AS varchar(80) CHECK (VALUE LIKE '%@%');
CREATE TABLE "commande_événement_表🎉" (
    "clé" integer PRIMARY KEY,
    "données" text,
    "état" "état",
    courriel courriel,
    amount numeric(12, 2),
    tags text[],
    doubled bigint GENERATED ALWAYS AS (amount::bigint * 2) STORED
);

CREATE TABLE part_event (id bigint, region text, note text, PRIMARY KEY (id, region))
    PARTITION BY LIST (region);
CREATE TABLE part_event_eu PARTITION OF part_event FOR VALUES IN ('eu');
-- Another physical column order than the root's.
CREATE TABLE part_event_us (note text, region text NOT NULL, id bigint NOT NULL);
ALTER TABLE part_event ATTACH PARTITION part_event_us FOR VALUES IN ('us');

CREATE TABLE toast_default (id integer PRIMARY KEY, big text, small text);
ALTER TABLE toast_default ALTER big SET STORAGE EXTERNAL;
CREATE TABLE toast_full (id integer PRIMARY KEY, big text, small text);
ALTER TABLE toast_full ALTER big SET STORAGE EXTERNAL, REPLICA IDENTITY FULL;
CREATE TABLE by_index (a integer, b integer NOT NULL, c text);
CREATE UNIQUE INDEX by_index_b ON by_index (b);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_b;
CREATE TABLE no_identity (v text, ts timestamptz, raw bytea, yes boolean);
ALTER TABLE no_identity REPLICA IDENTITY NOTHING;
CREATE TABLE parent (id serial PRIMARY KEY, v text);
CREATE TABLE child (id serial PRIMARY KEY, parent_id integer REFERENCES parent);
CREATE TABLE unpublished (id integer PRIMARY KEY);

-- no_identity and by_index are in: updates and deletes need an identity only
-- when they happen.
CREATE PUBLICATION golden FOR TABLE
    outbox_event, "commande_événement_表🎉", part_event, toast_default,
    toast_full, by_index, no_identity, parent, child
    WITH (publish = 'insert, update, delete, truncate', publish_via_partition_root = true);
SELECT pg_replication_origin_create('golden_origin');
SELECT pg_create_logical_replication_slot('golden', 'pgoutput');

-- -------------------------------------------------------------------- inserts
-- 1: NULL, text, empty string, JSON null.
BEGIN;
INSERT INTO outbox_event VALUES
    ('00000000-0000-4000-8000-000000000001', 1, 1, 'OrderPlaced', '{"n": 1, "s": "é表🎉"}'),
    ('00000000-0000-4000-8000-000000000002', 1, 2, '', NULL),
    ('00000000-0000-4000-8000-000000000003', -9223372036854775808, 9223372036854775807, E'a\tb\nc\\d"e', 'null');
COMMIT;
-- 2: a payload of 10 kB.
INSERT INTO outbox_event VALUES
    ('00000000-0000-4000-8000-000000000004', 2, 1, 'Big',
     jsonb_build_object('pad', repeat('0123456789', 1024)));
-- 3: user-defined types (Type messages) and a generated column.
INSERT INTO "commande_événement_表🎉" VALUES
    (1, 'données 表🎉', 'ouvert', 'a@b', 12.34, ARRAY['x', NULL, '"q,"']),
    (2, NULL, 'fermé', NULL, -0.50, '{}');
-- 4: other types; a table without an identity.
INSERT INTO no_identity VALUES
    ('', '2024-01-02 03:04:05.678901+00', '\x00ff41', true), (NULL, NULL, '', false);
-- 5: COPY.
COPY outbox_event (event_id, order_id, revision, event_type, payload) FROM STDIN;
00000000-0000-4000-8000-000000000005	3	1	Copied	{"i": 1}
00000000-0000-4000-8000-000000000006	3	2	Copied	{"i": 2}
00000000-0000-4000-8000-000000000007	3	3	Copied	\N
\.

-- --------------------------------------------------------- updates and deletes
-- 6-8: default identity: no old tuple, then 'K' for a changed key, 'K' deleted.
UPDATE outbox_event SET payload = '{"n": 2}' WHERE event_id = '00000000-0000-4000-8000-000000000001';
UPDATE outbox_event SET event_id = '00000000-0000-4000-8000-0000000000ff'
    WHERE event_id = '00000000-0000-4000-8000-000000000001';
DELETE FROM outbox_event WHERE event_id = '00000000-0000-4000-8000-0000000000ff';
-- 9-10: 20 kB out of line, then not changed ('u').
INSERT INTO toast_default VALUES (1, repeat('0123456789abcdef', 1250), 'one');
UPDATE toast_default SET small = 'two';
-- 11-14: full identity: 'O' tuples, the key changed or not; 'u' in the new one.
INSERT INTO toast_full VALUES (1, repeat('fedcba9876543210', 250), NULL), (2, '', 'plain');
UPDATE toast_full SET small = 'changed' WHERE id = 1;
UPDATE toast_full SET id = 20 WHERE id = 2;
DELETE FROM toast_full;
-- 15-18: identity by an index that is not the first column.
INSERT INTO by_index VALUES (1, 10, 'x'), (NULL, 20, NULL);
UPDATE by_index SET c = 'y' WHERE b = 10;
UPDATE by_index SET b = 11 WHERE b = 10;
DELETE FROM by_index WHERE b = 20;
-- 19: one row changed three times in a transaction.
BEGIN;
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-000000000008', 4, 1, 'Created', '{}');
UPDATE outbox_event SET revision = 2 WHERE order_id = 4;
DELETE FROM outbox_event WHERE order_id = 4;
COMMIT;

-- ----------------------------------------------------------------- partitions
-- 20-22: rows under the root's relation (the leaf's Relation is sent as well), the
-- move as a delete and an insert.
INSERT INTO part_event VALUES (1, 'eu', 'a'), (2, 'us', 'b');
UPDATE part_event SET region = 'us' WHERE id = 1;
UPDATE part_event_us SET note = 'c' WHERE id = 2;

-- ---------------------------------------------------------------------- origin
-- 23: Origin message after Begin.
SELECT pg_replication_origin_session_setup('golden_origin');
BEGIN;
SELECT pg_replication_origin_xact_setup('1/234ABCD', '2024-01-02 03:04:05+00');
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-000000000009', 5, 1, 'FromOrigin', '{}');
COMMIT;
SELECT pg_replication_origin_session_reset();

-- -------------------------------------------------------------------- messages
-- 24: transactional, in order with the rows; the other kind is sent at once,
-- before the Begin of the transaction it was written in, and survives a rollback.
BEGIN;
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-00000000000a', 6, 1, 'WithMessage', '{}');
SELECT pg_logical_emit_message(true, 'golden', 'transactional é表🎉');
SELECT pg_logical_emit_message(false, 'golden', 'not transactional, in a transaction');
COMMIT;
SELECT pg_logical_emit_message(false, '', '\x00ff00fe'::bytea);
-- 25: a transaction of nothing but an empty message.
SELECT pg_logical_emit_message(true, 'préfixe', '');
BEGIN;
SELECT pg_logical_emit_message(true, 'golden', 'never seen');
SELECT pg_logical_emit_message(false, 'golden', 'seen despite the rollback');
ROLLBACK;

-- ----------------------------------------------------------- changed relations
-- 26-27: each under a new Relation (empty in 14: both ALTER TABLE).
ALTER TABLE outbox_event ADD COLUMN trace text DEFAULT 'none';
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-00000000000b', 7, 1, 'Added', '{}', 'abc');
ALTER TABLE outbox_event DROP COLUMN trace;
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-00000000000c', 7, 2, 'Dropped', '{}');
-- 28: the relation changes within a transaction.
BEGIN;
INSERT INTO parent (v) VALUES ('before');
ALTER TABLE parent RENAME COLUMN v TO w;
INSERT INTO parent (w) VALUES ('after');
COMMIT;

-- ------------------------------------------------------------------- rollbacks
-- 29: rows 1 and 3 only; row 3 is of a subtransaction.
BEGIN;
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-00000000000d', 8, 1, 'Kept', '{}');
SAVEPOINT s;
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-00000000000e', 8, 2, 'RolledBack', '{}');
ROLLBACK TO s;
SAVEPOINT s2;
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-00000000000f', 8, 3, 'Kept', '{}');
RELEASE s2;
COMMIT;
-- Nothing (empty in 14: the second).
BEGIN;
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-000000000010', 9, 1, 'RolledBack', '{}');
ROLLBACK;
INSERT INTO unpublished VALUES (1);

-- -------------------------------------------------------------------- truncate
-- 30-34: child's truncation follows from the cascade.
INSERT INTO child (parent_id) VALUES (1);
TRUNCATE no_identity;
TRUNCATE toast_default, parent RESTART IDENTITY CASCADE;
TRUNCATE part_event;
INSERT INTO outbox_event VALUES ('00000000-0000-4000-8000-000000000011', 10, 1, 'Last', '{}');

-- What the files hold: every message of pgoutput's protocol version 1 that this
-- scenario makes, from PostgreSQL NN, in the order of decoding. Lines that start
-- with # describe the capture; every other line is "<lsn> <xid> <hex>", where
-- hex is one message from its type byte on. Begin, Commit, Origin, Relation,
-- Type, Insert, Update (no old tuple, 'K', 'O', unchanged TOAST), Delete ('K',
-- 'O'), Truncate (options 0, 3) and Message (both kinds) all occur. LSNs, xids,
-- OIDs and commit times differ from one capture to the next; rows do not.
