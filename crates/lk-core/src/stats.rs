//! Relaxed counters of engines and layers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counters of one layer since its creation.
#[derive(Debug, Default)]
pub struct LayerStats {
    steps: AtomicU64,
    tokens: AtomicU64,
    pairs: AtomicU64,
    busy_ns: AtomicU64,
}

impl LayerStats {
    pub(crate) fn record(&self, tokens: usize, pairs: usize, busy: Duration) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        self.pairs.fetch_add(pairs as u64, Ordering::Relaxed);
        self.busy_ns.fetch_add(busy.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Names and values: `steps`, `tokens`, `pairs` (token, expert), `busy_ns` (wall time of forward calls).
    pub fn entries(&self) -> [(&'static str, u64); 4] {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        [
            ("steps", get(&self.steps)),
            ("tokens", get(&self.tokens)),
            ("pairs", get(&self.pairs)),
            ("busy_ns", get(&self.busy_ns)),
        ]
    }
}
