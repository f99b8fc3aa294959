//! The thread that serves GPU requests: it polls the slots' flags and is worker 0 of the step.
//!
//! While requests come it spins, because a nap would cost its length once per layer. Without requests for
//! [`LeaderOptions::spin`] it naps, so that an idle server leaves the core to others; whoever launches a step may
//! [`wake`](Leader::wake) it, and if nobody does, it notices a request after at most one nap.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::topology::CpuId;
use crate::{Error, Result};

use super::mailbox::{Mailbox, SLOTS};

/// How the leader waits.
#[derive(Debug, Clone, Copy)]
pub struct LeaderOptions {
    /// How long it spins after the last request or wake-up before it naps.
    pub spin: Duration,
    /// Length of a nap; the most that a request can wait unseen.
    pub nap: Duration,
}

impl LeaderOptions {
    /// In service: longer than the GPU's part between two steps; naps short enough for a step to be seen
    /// within 100 µs.
    pub const DEFAULT: Self = Self { spin: Duration::from_millis(5), nap: Duration::from_micros(50) };
    /// With `LK_POWER_SAVING`: relies on the wake-up before each step.
    pub const POWER_SAVING: Self = Self { spin: Duration::from_millis(1), nap: Duration::from_millis(1) };
}

/// Polls between two looks at the clock and the stop flag.
const POLLS_PER_CLOCK: u32 = 64;
/// How long `stop` waits for a step that is running.
const JOIN_LIMIT: Duration = Duration::from_secs(2);

/// The running thread.
pub struct Leader {
    mailbox: Arc<Mailbox>,
    wake: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
    /// Process that has the thread.
    pid: u32,
}

impl Leader {
    /// Starts the thread on `cpus` (those of worker 0). A refused binding is told in the returned note.
    ///
    /// # Errors
    /// [`Error::Config`] when no thread can be started.
    pub fn start(
        engine: &Engine,
        mailbox: Arc<Mailbox>,
        cpus: Vec<CpuId>,
        options: LeaderOptions,
    ) -> Result<(Self, Option<String>)> {
        let wake = Arc::new(AtomicU32::new(0));
        let (ready, bound) = std::sync::mpsc::channel();
        let state = engine.state_reader();
        let body = {
            let (mailbox, wake) = (Arc::clone(&mailbox), Arc::clone(&wake));
            move || {
                // The receiver waits for this message.
                let _ = ready.send(crate::pool::prepare_service_thread(&cpus));
                Service { mailbox: &mailbox, wake: &wake, options, state: &*state }.run();
            }
        };
        let thread = thread::Builder::new().name("lk-leader".to_owned()).spawn(body).map_err(|error| {
            Error::Config(format!(
                "cannot start the leader thread: {error}; raise the limit on processes (ulimit -u)"
            ))
        })?;
        let note = match bound.recv() {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("the leader thread runs unbound: {error}")),
            Err(_) => Some("the leader thread ended at its start".to_owned()),
        };
        Ok((Self { mailbox, wake, thread: Some(thread), pid: std::process::id() }, note))
    }

    /// Has the leader spin for the next [`LeaderOptions::spin`]: called on the host before a step is launched.
    pub fn wake(&self) {
        self.wake.fetch_add(1, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    #[cfg(test)]
    pub(super) fn thread(&self) -> &JoinHandle<()> {
        self.thread.as_ref().expect("runs until stop")
    }

    /// Closes the mailbox and ends the thread; a step that does not end is abandoned with it.
    pub fn stop(&mut self) {
        self.mailbox.close();
        let Some(thread) = self.thread.take() else { return };
        if std::process::id() != self.pid {
            // A forked child has no such thread, and joining it would never return.
            std::mem::forget(thread);
            return;
        }
        thread.thread().unpark();
        let deadline = Instant::now() + JOIN_LIMIT;
        while !thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_micros(100));
        }
        if thread.is_finished() {
            // A panic outside of a request was reported by the panic hook.
            let _ = thread.join();
        } else {
            tracing::warn!("the leader thread did not end within {JOIN_LIMIT:?} and is abandoned");
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Service<'a> {
    mailbox: &'a Mailbox,
    wake: &'a AtomicU32,
    options: LeaderOptions,
    state: &'a dyn Fn() -> String,
}

impl Service<'_> {
    fn run(&self) {
        let mut served = [0u64; SLOTS];
        let mut woken = self.wake.load(Ordering::Acquire);
        let mut since = Instant::now();
        loop {
            let mut busy = false;
            for _ in 0..POLLS_PER_CLOCK {
                for (slot, last) in self.mailbox.slots().iter().zip(&mut served) {
                    let epoch = slot.header().request.epoch.load(Ordering::Acquire);
                    if epoch > *last {
                        self.mailbox.stats.skipped.fetch_add(epoch - *last - 1, Ordering::Relaxed);
                        *last = epoch;
                        if !self.serve(slot, epoch) {
                            return;
                        }
                        busy = true;
                    }
                }
                std::hint::spin_loop();
            }
            if self.mailbox.stop.load(Ordering::Acquire) {
                return;
            }
            let wake = self.wake.load(Ordering::Acquire);
            if busy || wake != woken {
                (since, woken) = (Instant::now(), wake);
            } else if since.elapsed() >= self.options.spin {
                self.mailbox.stats.naps.fetch_add(1, Ordering::Relaxed);
                thread::park_timeout(self.options.nap);
            }
        }
    }

    /// Computes and answers one request; `false` once the hand-over has ended.
    fn serve(&self, slot: &super::slot::Slot, epoch: u64) -> bool {
        let why = match catch_unwind(AssertUnwindSafe(|| self.mailbox.compute(slot, epoch))) {
            Ok(Ok(())) => {
                self.mailbox.idle();
                slot.answer(epoch);
                return true;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the leader thread panicked".to_owned(),
        };
        self.mailbox.fail(&why, &(self.state)());
        tracing::error!("hand-over to the GPU ended: {why}");
        false
    }
}
