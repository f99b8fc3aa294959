//! Worker pool: one pinned thread per worker, blocking jobs of several phases, barriers by node.
//!
//! A layer of a mixture of experts is a few tens of microseconds of memory traffic with two or three meeting points.
//! General thread pools spend as much on handing out work; here a job is one function that every worker runs once,
//! told its place ([`Worker`]), and phases are barriers inside it.
//!
//! - Worker 0 is the thread that calls [`Pool::run`]; the others are threads bound to the CPUs of their
//!   [`WorkerSlot`](crate::topology::WorkerSlot). The caller's affinity is never changed; a worker on whose CPU the
//!   caller is found takes the CPU of slot 0 meanwhile.
//! - Between jobs workers spin for a bounded time and then sleep; a job on spinning workers costs no system call, lock
//!   wait or allocation.
//! - Inside a job waiting threads spin briefly and then sleep too, so more workers than cores slow a job down by no more
//!   than their share of the cores.
//! - A worker that panics or returns an error sends all others out of their barriers; `run` returns what went
//!   wrong first. After a panic or a time-out the pool refuses all further work.
//! - A pool belongs to the process that made it: a forked child gets [`Error::Forked`].

#![expect(
    unsafe_code,
    reason = "jobs borrow from the caller's stack; futex, affinity and fork detection are system calls"
)]

mod affinity;
mod barrier;
mod fork;
mod gate;
#[cfg(all(test, loom))]
mod loom_tests;
mod seats;
mod shared;
mod steal;
mod sync;
mod watchdog;
mod worker;

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
pub(crate) use affinity::prepare_service_thread;
pub use barrier::Aborted;
use fork::Origin;
use seats::Seats;
use shared::{Job, Shared};
pub use steal::StealRange;
use watchdog::Watchdog;
pub use worker::Worker;

use crate::topology::{NodePlan, WorkerPlan, WorkerSlot};
use crate::{Error, Result};

/// Told the workers' state when a timed-out job cannot be ended; see [`Pool::run_with_timeout`].
pub type StuckHandler = Arc<dyn Fn(&str) + Send + Sync>;

/// How long threads spin, and whom to tell about a stuck job.
#[derive(Clone)]
pub struct PoolOptions {
    /// Microseconds that an idle worker spins for the next job before it sleeps; 0 sleeps at once.
    pub spin_us: u32,
    /// Microseconds that a worker spins inside a job, at a barrier or for the end, before it sleeps.
    ///
    /// When workers share CPUs, both limits only tell whether a waiting thread gives way a few times (not 0) or sleeps
    /// at once (0).
    pub barrier_spin_us: u32,
    /// Never spin between jobs, whatever `spin_us` says.
    pub power_saving: bool,
    /// Called on the watchdog's thread, once per stuck job.
    pub on_stuck: Option<StuckHandler>,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { spin_us: 60, barrier_spin_us: 60, power_saving: false, on_stuck: None }
    }
}

impl fmt::Debug for PoolOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolOptions")
            .field("spin_us", &self.spin_us)
            .field("barrier_spin_us", &self.barrier_spin_us)
            .field("power_saving", &self.power_saving)
            .field("on_stuck", &self.on_stuck.is_some())
            .finish()
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    watchdog: Watchdog,
    /// Held by the caller whose job runs.
    serial: Mutex<Seats>,
    poison: OnceLock<Error>,
    origin: Origin,
    options: PoolOptions,
    notes: Vec<String>,
}

/// What a worker thread reports before its first job.
struct Started {
    index: usize,
    /// Its number, or why it could not be bound.
    thread: std::result::Result<affinity::ThreadId, String>,
}

/// At drop, threads that have not ended after this time are abandoned.
const JOIN_LIMIT: Duration = Duration::from_secs(2);

thread_local! {
    /// The pool whose job this thread is in (its address; 0 for none).
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

impl Pool {
    /// Starts a thread for every worker of `plan` but worker 0, and returns when all are bound to their CPUs.
    ///
    /// A thread that can't be bound works unbound; [`notes`](Self::notes) says so.
    ///
    /// # Errors
    /// [`Error::Config`] when the plan has no node, a node without workers, or threads can't be started.
    pub fn new(plan: &WorkerPlan, options: &PoolOptions) -> Result<Arc<Self>> {
        let sizes: Vec<usize> = plan.nodes.iter().map(|node| node.workers.len()).collect();
        if sizes.is_empty() || sizes.contains(&0) {
            return Err(Error::Config(format!(
                "the worker plan has {} nodes with {sizes:?} workers; every node needs at least one",
                sizes.len()
            )));
        }
        let micros = |us: u32| Duration::from_micros(u64::from(us));
        let idle_spin = micros(if options.power_saving { 0 } else { options.spin_us });
        let barrier_spin = micros(options.barrier_spin_us);
        let slots = plan.nodes.iter().flat_map(|node| &node.workers);
        let cpus: HashSet<_> = slots.flat_map(|slot| &slot.cpus).collect();
        let crowded = plan.num_workers() > cpus.len();
        let shared = Arc::new(Shared::new(&sizes, idle_spin, barrier_spin, crowded));
        let mut pool = Self {
            shared,
            threads: Vec::new(),
            watchdog: Watchdog::default(),
            serial: Mutex::new(Seats::new(plan, &[])),
            poison: OnceLock::new(),
            origin: Origin::here(),
            options: options.clone(),
            notes: Vec::new(),
        };
        // On error the drop of `pool` ends the threads that were started.
        pool.start_threads(plan)?;
        Ok(Arc::new(pool))
    }

    fn start_threads(&mut self, plan: &WorkerPlan) -> Result<()> {
        let (sender, started) = mpsc::channel();
        let mut index = 0;
        for node in &plan.nodes {
            for (index_in_node, slot) in node.workers.iter().enumerate() {
                if index > 0 {
                    let thread = self.start_thread(index, index_in_node, node, slot, sender.clone())?;
                    self.threads.push(thread);
                }
                index += 1;
            }
        }
        drop(sender);
        let mut bound = vec![None; self.threads.len()];
        let mut unbound = Vec::new();
        // Ends when the last sender is gone, that is when every thread has reported.
        for Started { index, thread } in started {
            match thread {
                Ok(thread) => bound[index - 1] = Some(thread),
                Err(reason) => unbound.push(reason),
            }
        }
        if let Some(first) = unbound.first() {
            self.notes.push(format!(
                "{} of {} worker threads could not be bound to their CPUs and run where the system puts them ({first})",
                unbound.len(),
                self.threads.len()
            ));
        }
        self.serial = Mutex::new(Seats::new(plan, &bound));
        Ok(())
    }

    fn start_thread(
        &self,
        index: usize,
        index_in_node: usize,
        node: &NodePlan,
        slot: &WorkerSlot,
        started: mpsc::Sender<Started>,
    ) -> Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.shared);
        let cpus = slot.cpus.clone();
        let name = format!("lk-{}-{index_in_node}", node.node.0);
        let key = Arc::as_ptr(&self.shared) as usize;
        let body = move || {
            affinity::block_signals();
            let thread = affinity::bind_thread(0, &cpus)
                .map(|()| affinity::current_thread())
                .map_err(|error| format!("CPUs {:?}: {error}", cpus.iter().map(|c| c.0).collect::<Vec<_>>()));
            // Fails only if a later thread could not be started, and then nobody wants to know.
            let _ = started.send(Started { index, thread });
            drop(started);
            CURRENT.set(key);
            shared.work(index);
        };
        thread::Builder::new().name(name.clone()).spawn(body).map_err(|error| {
            Error::Config(format!(
                "cannot start worker thread {name} ({index} of {} started): {error}; lower LK_THREADS or raise the \
                 limit on processes (ulimit -u, the container's pids limit)",
                index - 1
            ))
        })
    }

    /// Number of workers over all nodes, the caller's thread included.
    pub fn workers(&self) -> usize {
        self.shared.workers.len()
    }

    /// Number of workers of every node, in the plan's order.
    pub fn node_workers(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.shared.nodes.iter().map(|node| node.workers)
    }

    /// What degraded while starting, for the log; empty if nothing did.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Runs `job` once on every worker, worker 0's share on the calling thread, and returns when all have finished.
    ///
    /// What the caller wrote before is visible to all workers, what they wrote is visible after. Calls from several
    /// threads run one after the other.
    ///
    /// # Errors
    /// The first error that a worker's share returned (the pool stays usable); [`Error::Poisoned`] when a share
    /// panicked, now or in an earlier job; [`Error::Forked`] in a child process; [`Error::Argument`] when called
    /// from inside a job of this pool.
    pub fn run(&self, job: &(dyn Fn(&Worker<'_>) -> Result<()> + Sync)) -> Result<()> {
        self.run_watched(job, None)
    }

    /// As [`run`](Self::run), and ends the job when no worker makes progress (barriers, claims,
    /// [`Worker::progress`]) for `limit`.
    ///
    /// The job borrows from the caller, so the call returns only when every worker has left the job. Workers at
    /// barriers leave at once. One that hangs inside its share cannot be made to: then the call does not return;
    /// [`PoolOptions::on_stuck`] is called from the watchdog's thread with the workers' state, and its owner
    /// decides (release who waits for the result, end the process).
    ///
    /// # Errors
    /// As `run`; [`Error::Timeout`] with the workers' state when the limit was hit, after which the pool is poisoned.
    pub fn run_with_timeout(
        &self,
        job: &(dyn Fn(&Worker<'_>) -> Result<()> + Sync),
        limit: Duration,
    ) -> Result<()> {
        self.run_watched(job, Some(limit))
    }

    fn run_watched(&self, job: &Job<'_>, limit: Option<Duration>) -> Result<()> {
        if !self.origin.is_here() {
            return Err(self.forked());
        }
        let _inside = Inside::enter(Arc::as_ptr(&self.shared) as usize)?;
        let mut seats = self.serial.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = self.poison.get() {
            return Err(error.clone());
        }
        seats.settle();
        let watch = match limit {
            Some(limit) => Some(self.watchdog.watch(&self.shared, limit, self.options.on_stuck.as_ref())?),
            None => None,
        };
        self.shared.dispatch(job);
        // Before the outcome is read: the watchdog must not fail a job that has already ended.
        drop(watch);
        match self.shared.outcome() {
            None => Ok(()),
            Some(failure) => {
                if failure.poisons {
                    let _ = self.poison.set(match &failure.error {
                        error @ Error::Poisoned { .. } => error.clone(),
                        error => Error::Poisoned { worker: failure.worker, message: error.to_string() },
                    });
                }
                Err(failure.error)
            }
        }
    }

    /// Whether a panic or a time-out has ended the pool's use; returns what `run` will return.
    pub fn poisoned(&self) -> Option<&Error> {
        self.poison.get()
    }

    #[cold]
    fn forked(&self) -> Error {
        Error::Forked(format!(
            "the worker pool belongs to process {}, this is its forked child {}, which has none of the threads; \
             start worker processes before the pool is made, or by spawn instead of fork \
             (VLLM_WORKER_MULTIPROC_METHOD=spawn)",
            self.origin.pid(),
            std::process::id()
        ))
    }

    /// A count per worker that grows while it makes progress.
    pub fn heartbeats(&self) -> Vec<u64> {
        self.shared.heartbeats()
    }

    /// The number of the last job and every worker's phase and heartbeat, in one line.
    pub fn state(&self) -> String {
        self.shared.describe()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // The threads exist in the parent only.
            self.threads.drain(..).for_each(std::mem::forget);
            self.watchdog.forget();
            return;
        }
        self.watchdog.stop();
        self.shared.stop();
        let deadline = Instant::now() + JOIN_LIMIT;
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            thread::sleep(Duration::from_micros(100));
        }
        let (ended, running): (Vec<_>, Vec<_>) = self.threads.drain(..).partition(JoinHandle::is_finished);
        for thread in ended {
            // Shares run under `catch_unwind`; a panic elsewhere was reported by the panic hook.
            let _ = thread.join();
        }
        if !running.is_empty() {
            tracing::warn!(
                "{} worker threads did not end within {JOIN_LIMIT:?} and are abandoned: {}",
                running.len(),
                self.shared.describe()
            );
        }
    }
}

/// Marks the calling thread as inside a job of a pool, for as long as it lives.
struct Inside(usize);

impl Inside {
    fn enter(pool: usize) -> Result<Self> {
        let outer = CURRENT.get();
        if outer == pool {
            return Err(Error::Argument(
                "a job called run of its own pool, whose workers are all in that job; use a barrier and another phase"
                    .to_owned(),
            ));
        }
        CURRENT.set(pool);
        Ok(Self(outer))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}
