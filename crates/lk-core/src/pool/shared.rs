//! What caller and workers share: job hand-out, completion, failure.
//!
//! One job is one turn of every gate: the caller writes the job cell and advances each node's `go`; workers run
//! the job and count down; the last of the last node advances `done`. The caller returns only after that, so the
//! job, which lives on the caller's stack, outlives every use of it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crossbeam_utils::CachePadded;

use super::barrier::Barrier;
use super::gate::{Gate, SpinBudget, Ticket};
use super::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering, UnsafeCell};
use super::worker::{Phase, Worker, WorkerState};
use crate::{Error, Result};

/// A job: one function that every worker runs once.
pub(super) type Job<'job> = dyn Fn(&Worker<'_>) -> Result<()> + Sync + 'job;

/// One node's part of the shared state.
#[derive(Debug)]
pub(super) struct Node {
    /// Number of the node's first worker.
    pub(super) first: usize,
    pub(super) workers: usize,
    pub(super) barrier: Barrier,
    go: CachePadded<HandOut>,
    finished: CachePadded<AtomicU32>,
    /// Threads that wait at `go`: all workers but worker 0.
    threads: u32,
}

/// The gate and what it hands out, on one cache line, so that a spinning worker gets both in one transfer.
#[derive(Debug)]
struct HandOut {
    /// Advanced once per job, and once more to end the threads.
    gate: Gate,
    /// `None` ends the thread.
    job: UnsafeCell<Option<JobPointer>>,
}

/// Why a job ended early.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) worker: usize,
    pub(super) error: Error,
    /// The workers' state can't be trusted any more.
    pub(super) poisons: bool,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) nodes: Box<[Node]>,
    pub(super) workers: Box<[CachePadded<WorkerState>]>,
    pub(super) root: Barrier,
    /// Nodes that have threads, and how many of them have finished the job.
    thread_nodes: u32,
    finished_nodes: CachePadded<AtomicU32>,
    done: CachePadded<Gate>,
    /// Set with the first failure of a job, cleared before the next.
    pub(super) failed: AtomicBool,
    failure: Mutex<Option<Failure>>,
    /// Jobs handed out, for dumps and the watchdog. Written per job, so kept away from what workers read.
    epoch: CachePadded<AtomicU64>,
}

/// The caller's job with its lifetime erased.
#[derive(Debug, Clone, Copy)]
struct JobPointer(*const Job<'static>);

// SAFETY: the pointee is `Sync` by `Job`'s definition; the pointer is only a copy of a shared reference.
unsafe impl Send for JobPointer {}

// SAFETY: the nodes' job cells are the only fields that are not `Sync` by themselves. They are written by the caller alone, who is
// the only one between two jobs (`dispatch` is entered under the pool's lock and left after all have finished),
// before the release of `go`; workers read them after the acquire of `go` and before the release of `done`.
unsafe impl Sync for Shared {}

impl Shared {
    /// `node_workers[n]` workers on node `n`, each at least one; `crowded` if they share CPUs.
    pub(super) fn new(
        node_workers: &[usize],
        idle_spin: Duration,
        barrier_spin: Duration,
        crowded: bool,
    ) -> Self {
        let mut first = 0;
        let nodes: Box<[Node]> = node_workers
            .iter()
            .map(|&workers| {
                let node = Node {
                    first,
                    workers,
                    barrier: Barrier::new(workers as u32),
                    go: CachePadded::new(HandOut { gate: Gate::new(), job: UnsafeCell::new(None) }),
                    finished: CachePadded::new(AtomicU32::new(0)),
                    threads: workers as u32 - u32::from(first == 0),
                };
                first += workers;
                node
            })
            .collect();
        let budget = |limit| SpinBudget::new(limit, crowded);
        let worker = |_| CachePadded::new(WorkerState::new(budget(idle_spin), budget(barrier_spin)));
        Self {
            root: Barrier::new(nodes.len() as u32),
            thread_nodes: nodes.iter().filter(|node| node.threads > 0).count() as u32,
            nodes,
            workers: (0..first).map(worker).collect(),
            finished_nodes: CachePadded::new(AtomicU32::new(0)),
            done: CachePadded::new(Gate::new()),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            epoch: CachePadded::new(AtomicU64::new(0)),
        }
    }

    /// Node and number within it of worker `index`.
    pub(super) fn place(&self, index: usize) -> (usize, usize) {
        let node = self.nodes.partition_point(|node| node.first <= index) - 1;
        (node, index - self.nodes[node].first)
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Runs `job` on all workers, worker 0's share on this thread; returns when all have left it.
    ///
    /// The caller makes sure that no other `dispatch` of this `Shared` runs, and asks for the
    /// [`outcome`](Self::outcome) before the next.
    pub(super) fn dispatch(&self, job: &Job<'_>) {
        let done = self.done.ticket();
        self.epoch.store(self.epoch.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        #[expect(clippy::transmute_ptr_to_ptr, reason = "a cast can't lengthen a trait object's lifetime")]
        // SAFETY: only the lifetime changes. No worker uses the pointer after `done` advances, and this function
        // waits for that before it returns, on every path: shares are run under `catch_unwind`.
        let pointer = unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) };
        self.hand_out(Some(JobPointer(pointer)));

        let state = &self.workers[0];
        self.share(&Worker::new(self, 0), job);
        state.enter(Phase::Finished);
        if self.workers.len() > 1 {
            self.done.wait(done, &state.barrier_spin);
        }
        state.enter(Phase::Idle);
    }

    /// Why the job that has just ended failed, if it did; makes the barriers usable again.
    pub(super) fn outcome(&self) -> Option<Failure> {
        if self.failed.load(Ordering::Relaxed) { self.recover() } else { None }
    }

    /// Gives every thread its next job, or its end. Only between jobs.
    fn hand_out(&self, job: Option<JobPointer>) {
        for node in self.nodes.iter().filter(|node| node.threads > 0) {
            // SAFETY: no worker reads the cell between two jobs (see `Sync`), so this is the only access.
            node.go.job.with_mut(|cell| unsafe { *cell = job });
            node.go.gate.advance();
        }
    }

    #[cold]
    fn recover(&self) -> Option<Failure> {
        self.root.reset();
        for node in &self.nodes {
            node.barrier.reset();
        }
        self.failed.store(false, Ordering::Relaxed);
        self.failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
    }

    /// Body of the thread of worker `index` (not 0); returns after [`Shared::stop`].
    pub(super) fn work(&self, index: usize) {
        let worker = Worker::new(self, index);
        let node = &self.nodes[worker.node];
        let state = &self.workers[index];
        let mut ticket = Ticket::FIRST;
        loop {
            ticket = node.go.gate.wait(ticket, &state.idle_spin);
            // SAFETY: the gate has been acquired, so the caller's write of the cell is visible, and no other follows
            // before this worker has counted itself out below.
            let Some(JobPointer(job)) = node.go.job.with(|cell| unsafe { *cell }) else {
                state.enter(Phase::Exited);
                return;
            };
            // SAFETY: the caller keeps the job alive until `done`, see `dispatch`.
            self.share(&worker, unsafe { &*job });
            state.enter(Phase::Finished);
            self.finish(node);
            state.enter(Phase::Idle);
        }
    }

    /// Counts one thread out of the job; the last opens `done`.
    fn finish(&self, node: &Node) {
        // AcqRel all the way, so that the caller sees what every worker wrote.
        if node.finished.fetch_add(1, Ordering::AcqRel) + 1 < node.threads {
            return;
        }
        node.finished.store(0, Ordering::Relaxed);
        if self.finished_nodes.fetch_add(1, Ordering::AcqRel) + 1 < self.thread_nodes {
            return;
        }
        self.finished_nodes.store(0, Ordering::Relaxed);
        self.done.advance();
    }

    /// Runs one worker's share; a panic or an error aborts the job.
    fn share(&self, worker: &Worker<'_>, job: &Job<'_>) {
        self.workers[worker.index].enter(Phase::Running);
        match catch_unwind(AssertUnwindSafe(|| job(worker))) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.fail(Failure { worker: worker.index, error, poisons: false }),
            Err(payload) => {
                let message = panic_message(payload);
                let error = Error::Poisoned { worker: worker.index, message };
                self.fail(Failure { worker: worker.index, error, poisons: true });
            }
        }
    }

    /// Keeps the first failure of the job and sends everybody out of the barriers.
    #[cold]
    pub(super) fn fail(&self, failure: Failure) {
        {
            let mut first = self.failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            match &mut *first {
                None => *first = Some(failure),
                // A panic is graver than an error that happened to be earlier.
                Some(earlier) if failure.poisons && !earlier.poisons => *earlier = failure,
                Some(_) => {}
            }
        }
        self.failed.store(true, Ordering::Relaxed);
        self.root.abort();
        for node in &self.nodes {
            node.barrier.abort();
        }
    }

    /// Ends the worker threads. No job may be running.
    pub(super) fn stop(&self) {
        self.hand_out(None);
    }

    /// Number of a worker that is neither waiting nor finished, for the blame; 0 if there is none.
    pub(super) fn suspect(&self) -> usize {
        self.workers.iter().position(|state| state.is_in(Phase::Running)).unwrap_or(0)
    }

    /// Heartbeats of all workers.
    pub(super) fn heartbeats(&self) -> Vec<u64> {
        self.workers.iter().map(|state| state.heartbeat()).collect()
    }

    /// Epoch and every worker's phase and heartbeat, in one line.
    pub(super) fn describe(&self) -> String {
        use std::fmt::Write;
        let mut text = format!("job {}", self.epoch());
        for (number, node) in self.nodes.iter().enumerate() {
            let _ = write!(text, "; node {number}:");
            for (index, state) in self.workers.iter().enumerate().skip(node.first).take(node.workers) {
                let separator = if index == node.first { "" } else { "," };
                let (phase, beat) = (state.phase_name(), state.heartbeat());
                let _ = write!(text, "{separator} worker {index} {phase} (heartbeat {beat})");
            }
        }
        text
    }
}

/// The text of a panic. A payload of another type is leaked: dropping it could panic again.
fn panic_message(payload: Box<dyn Any + Send>) -> String {
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => match payload.downcast::<&'static str>() {
            Ok(text) => (*text).to_owned(),
            Err(payload) => {
                std::mem::forget(payload);
                "panicked with a value that is not text".to_owned()
            }
        },
    }
}
