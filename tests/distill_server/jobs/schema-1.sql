PRAGMA journal_mode = WAL;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of submission
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    config_json TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    phase TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    max_steps INTEGER NOT NULL,
    metrics TEXT NOT NULL,  -- a JSON object, of the newest step
    created_at REAL NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL NOT NULL,
    last_seq INTEGER NOT NULL,
    place INTEGER NOT NULL  -- in the queue
);
CREATE INDEX jobs_by_state ON jobs (state, place);
CREATE INDEX jobs_by_place ON jobs (place);
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    retries INTEGER NOT NULL,  -- automatic ones, since a person last asked for an attempt
    from_step INTEGER,  -- NULL: the newest checkpoint
    seen_step INTEGER NOT NULL,  -- newest step whose metrics are among the events
    PRIMARY KEY (job_id, number)
) WITHOUT ROWID;
CREATE TABLE events (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    seq INTEGER NOT NULL,
    time REAL NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    phase TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    max_steps INTEGER NOT NULL,
    metrics TEXT NOT NULL,
    PRIMARY KEY (job_id, seq)
) WITHOUT ROWID;
CREATE TABLE submissions (
    idempotency_key TEXT PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES jobs (id),
    config_sha256 TEXT NOT NULL
) WITHOUT ROWID;
PRAGMA user_version = 1;
