-- The sample domain: orders, and the outbox their events are written to in the same transaction.
-- An existing deployment has its own and does not need this file.

CREATE TABLE IF NOT EXISTS sales_order (
    order_id bigint PRIMARY KEY,
    state    text   NOT NULL CHECK (state IN ('pending', 'paid', 'shipped', 'cancelled')),
    revision bigint NOT NULL DEFAULT 0 CHECK (revision >= 0)
);

-- No published_at: the confirmed LSN takes its place.
CREATE TABLE IF NOT EXISTS outbox_event (
    event_id   uuid   PRIMARY KEY DEFAULT gen_random_uuid(),
    order_id   bigint NOT NULL REFERENCES sales_order (order_id),
    revision   bigint NOT NULL CHECK (revision > 0),
    event_type text   NOT NULL,
    payload    jsonb  NOT NULL,
    CONSTRAINT outbox_order_revision_key UNIQUE (order_id, revision)
);
