-- Run by the postgres image when it makes the database: the two roles of the README, no superuser.

\set shop_password `cat /run/secrets/shop`
\set tailer_password `cat /run/secrets/tailer`

-- `init`: owns the database and the tables that it makes there.
CREATE ROLE shop LOGIN REPLICATION PASSWORD :'shop_password';
ALTER DATABASE shop OWNER TO shop;

-- The worker. Its tables are made here, because only what is there can be granted.
CREATE ROLE tailer LOGIN REPLICATION PASSWORD :'tailer_password';
SET ROLE shop;
\i /migrations/V1__position.sql
GRANT USAGE ON SCHEMA outbox_tailer TO tailer;
GRANT SELECT, UPDATE ON outbox_tailer.position TO tailer;
GRANT SELECT ON outbox_tailer.schema_version, outbox_tailer.audit TO tailer;
