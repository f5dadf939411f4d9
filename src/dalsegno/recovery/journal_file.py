"""The journal's file: its tables, and making it, for its owner alone."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

BUSY_S = 10.0  # how long one connection waits for another's write
MOST_WAL_BYTES = 16 << 20
_SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (node TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS marks (id INTEGER PRIMARY KEY, at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS actions (
    id TEXT PRIMARY KEY, node TEXT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    begun_at REAL NOT NULL, ended_at REAL, error TEXT, told TEXT);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, node TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
    stage TEXT NOT NULL DEFAULT '', jobs TEXT);
CREATE INDEX IF NOT EXISTS events_of_node ON events (node, id);
CREATE TABLE IF NOT EXISTS passports (
    uuid TEXT PRIMARY KEY, node TEXT NOT NULL, slot INTEGER NOT NULL, serial TEXT NOT NULL, model TEXT NOT NULL,
    since REAL NOT NULL, sent_away_at REAL);
CREATE TABLE IF NOT EXISTS checks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, node TEXT NOT NULL, name TEXT NOT NULL,
    verdict TEXT NOT NULL, text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS checks_of_node ON checks (node, id);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# What files that were made before lack.
_ADDED = {"stage": "TEXT NOT NULL DEFAULT ''", "jobs": "TEXT"}


def open_file(path: Path) -> sqlite3.Connection:
    """Two who make the file at the same moment disturb each other, and SQLite does not wait there by itself."""
    until = time.monotonic() + BUSY_S
    while True:
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            os.chmod(path, 0o600)
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # counts for a new file: what is dropped is given back
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA journal_size_limit={MOST_WAL_BYTES}")
            db.execute("PRAGMA synchronous=FULL")
            db.executescript(_SCHEMA)
            _add_columns(db)
            return db
        except sqlite3.OperationalError as error:
            db.close()
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _add_columns(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    known = {row[1] for row in db.execute("PRAGMA table_info(events)")}
    for name, declared in _ADDED.items():
        if name not in known:
            db.execute(f"ALTER TABLE events ADD COLUMN {name} {declared}")
    db.execute("COMMIT")
