-- The worker's own schema. Applied by `outbox-tailer init`, or by hand with psql; safe to run twice.

CREATE SCHEMA IF NOT EXISTS outbox_tailer;

-- The newest migration that was applied. A worker that knows only older ones refuses to start.
CREATE TABLE IF NOT EXISTS outbox_tailer.schema_version (
    version    integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- One row a slot: the recovery position. It moves only by compare-and-swap on (epoch, confirmed_lsn).
CREATE TABLE IF NOT EXISTS outbox_tailer.position (
    slot              text PRIMARY KEY,
    system_identifier text NOT NULL,
    timeline          bigint NOT NULL,
    database          text NOT NULL,
    publication       text NOT NULL,
    -- What the publication and its tables were when they were accepted, with OIDs and xmins.
    descriptor        jsonb NOT NULL,
    -- Everything at or below is acknowledged by Kafka.
    confirmed_lsn     pg_lsn NOT NULL,
    -- Of the last commit at or below confirmed_lsn.
    committed_at      timestamptz,
    -- Grows by one whenever a worker takes the slot.
    epoch             bigint NOT NULL DEFAULT 0,
    instance          text,
    kafka_cluster     text,
    -- Topic -> number of partitions over which keys are placed.
    partitions        jsonb NOT NULL DEFAULT '{}',
    -- Why the worker refuses to go on, as it last said; NULL while it does not.
    refusal           jsonb,
    updated_at        timestamptz NOT NULL DEFAULT now()
);

-- What was decided by whom. The worker reads skips and start-overs back.
CREATE TABLE IF NOT EXISTS outbox_tailer.audit (
    id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     timestamptz NOT NULL DEFAULT now(),
    slot   text NOT NULL,
    action text NOT NULL,
    actor  text NOT NULL DEFAULT session_user,
    detail jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX IF NOT EXISTS audit_slot_action ON outbox_tailer.audit (slot, action);

-- Rows that the slot never streams: they were there when it was made, or when their table was added.
CREATE TABLE IF NOT EXISTS outbox_tailer.not_streamed (
    slot     text NOT NULL,
    table_oid oid NOT NULL,
    event_id text NOT NULL,
    PRIMARY KEY (slot, table_oid, event_id)
);

-- Snapshots with the WAL position reached after taking them: what a later prune may rely on.
CREATE TABLE IF NOT EXISTS outbox_tailer.watermark (
    slot     text NOT NULL,
    lsn      pg_lsn NOT NULL,
    snapshot pg_snapshot NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (slot, lsn)
);

INSERT INTO outbox_tailer.schema_version (version) VALUES (1) ON CONFLICT DO NOTHING;
