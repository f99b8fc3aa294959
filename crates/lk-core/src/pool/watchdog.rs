//! Ends jobs in which no worker makes progress.
//!
//! A thread of its own watches, because every worker, the caller included, may be the one that hangs. It exists
//! only once a job with a limit was run, sleeps while there is none, and costs such a job two atomic operations.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::StuckHandler;
use super::shared::{Failure, Shared};
use crate::{Error, Result};

/// The watching thread sleeps and must be woken for the next limit.
const ASLEEP: u64 = 1;
/// Looks per limit; a hang is noticed at most one look late.
const LOOKS_PER_LIMIT: u32 = 8;
const LONGEST_NAP: Duration = Duration::from_millis(250);
/// After a time-out, workers get this long (or the limit, if shorter) to leave before the job counts as stuck.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct Watchdog {
    thread: Mutex<Option<JoinHandle<()>>>,
    order: Arc<Order>,
}

/// What the caller tells the watching thread.
#[derive(Debug, Default)]
struct Order {
    /// The running job's limit in microseconds, shifted by one; 0 when none is watched; [`ASLEEP`].
    limit: AtomicU64,
    stop: AtomicBool,
    /// Held while a job is declared dead and while one ends, so that the one is never mistaken for the next.
    verdict: Mutex<()>,
}

/// How a watched job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Alive,
    /// Aborted; its workers were asked to leave.
    Dead,
    /// A worker did not leave; the owner has been told.
    Stuck,
}

/// A watched job; ends the watch when dropped.
pub(super) struct Watch<'dog>(&'dog Order);

impl Watchdog {
    /// Watches the job that is about to start.
    pub(super) fn watch(
        &self,
        shared: &Arc<Shared>,
        limit: Duration,
        on_stuck: Option<&StuckHandler>,
    ) -> Result<Watch<'_>> {
        let mut thread = lock(&self.thread);
        let handle = match &mut *thread {
            Some(handle) => handle,
            none => {
                let (shared, order) = (Arc::clone(shared), Arc::clone(&self.order));
                let on_stuck = on_stuck.cloned();
                let handle = std::thread::Builder::new()
                    .name("lk-watchdog".to_owned())
                    .spawn(move || {
                        super::affinity::block_signals();
                        order.run(&shared, on_stuck.as_ref());
                    })
                    .map_err(|error| {
                        Error::Config(format!(
                            "cannot start the watchdog thread: {error}; raise the limit on processes (ulimit -u)"
                        ))
                    })?;
                none.insert(handle)
            }
        };
        let micros = u64::try_from(limit.as_micros()).unwrap_or(u64::MAX).clamp(1, u64::MAX >> 1);
        if self.order.limit.swap(micros << 1, Ordering::AcqRel) & ASLEEP != 0 {
            handle.thread().unpark();
        }
        Ok(Watch(&self.order))
    }

    /// Ends the thread; for a process that has it.
    pub(super) fn stop(&mut self) {
        self.order.stop.store(true, Ordering::Release);
        if let Some(handle) = lock(&self.thread).take() {
            handle.thread().unpark();
            // Fails only if the thread panicked, which the panic hook has reported.
            let _ = handle.join();
        }
    }

    /// Forgets a thread that exists in the parent process only.
    pub(super) fn forget(&mut self) {
        if let Ok(Some(handle)) = self.thread.get_mut().map(Option::take) {
            std::mem::forget(handle);
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let _verdict = lock(&self.0.verdict);
        self.0.limit.store(0, Ordering::Release);
    }
}

impl Order {
    fn run(&self, shared: &Shared, on_stuck: Option<&StuckHandler>) {
        while self.await_limit() {
            self.follow(shared, on_stuck);
        }
    }

    /// Sleeps until a job with a limit runs; `false` to end.
    fn await_limit(&self) -> bool {
        // Not asleep at once: watched jobs follow each other closely, and waking this thread costs the caller.
        std::thread::park_timeout(LONGEST_NAP);
        loop {
            if self.stop.load(Ordering::Acquire) {
                return false;
            }
            match self.limit.load(Ordering::Acquire) {
                0 => {
                    let _ = self.limit.compare_exchange(0, ASLEEP, Ordering::AcqRel, Ordering::Relaxed);
                }
                ASLEEP => std::thread::park(),
                _ => return true,
            }
        }
    }

    /// The running job's limit, if there is one.
    fn limit(&self) -> Option<Duration> {
        let limit = self.limit.load(Ordering::Acquire) >> 1;
        (limit > 0).then(|| Duration::from_micros(limit))
    }

    /// Watches as long as a limit is set.
    fn follow(&self, shared: &Shared, on_stuck: Option<&StuckHandler>) {
        let mut seen = (shared.epoch(), shared.heartbeats());
        let mut since = Instant::now();
        let mut verdict = Verdict::Alive;
        while let Some(limit) = self.limit() {
            let nap = limit / LOOKS_PER_LIMIT;
            std::thread::park_timeout(nap.clamp(Duration::from_micros(100), LONGEST_NAP));
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let now = (shared.epoch(), shared.heartbeats());
            if now != seen {
                if now.0 != seen.0 {
                    verdict = Verdict::Alive;
                }
                (seen, since) = (now, Instant::now());
                continue;
            }
            let still = since.elapsed();
            match verdict {
                Verdict::Alive if still >= limit && self.declare_dead(shared, seen.0, limit) => {
                    (verdict, since) = (Verdict::Dead, Instant::now());
                }
                Verdict::Dead if still >= limit.min(GRACE) => {
                    verdict = Verdict::Stuck;
                    let state = shared.describe();
                    tracing::error!("a worker does not leave its job: {state}");
                    if let Some(handler) = on_stuck {
                        handler(&state);
                    }
                }
                _ => {}
            }
        }
    }

    /// Fails the running job if it is still job `epoch`.
    fn declare_dead(&self, shared: &Shared, epoch: u64, limit: Duration) -> bool {
        let _verdict = lock(&self.verdict);
        if self.limit().is_none() || shared.epoch() != epoch {
            return false;
        }
        let message = format!("no progress for {:.1} s: {}", limit.as_secs_f64(), shared.describe());
        shared.fail(Failure { worker: shared.suspect(), error: Error::Timeout(message), poisons: true });
        true
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
