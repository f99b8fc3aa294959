//! What a job sees of the worker that runs it.

use std::cell::Cell;
use std::marker::PhantomData;

use super::barrier::{Aborted, Arrival};
use super::gate::SpinBudget;
use super::shared::Shared;
use super::steal::StealRange;
use super::sync::{AtomicU32, AtomicU64, Ordering};

/// One worker's place in the pool and its means to meet the others; handed to the job on the worker's thread.
///
/// All workers of a job must pass the same sequence of barriers.
#[derive(Debug)]
pub struct Worker<'pool> {
    /// Number over all nodes, `0..workers`; 0 is the thread that called `run`.
    pub index: usize,
    /// Position of its node in the plan (not the system's node number).
    pub node: usize,
    /// Number within the node, `0..node_workers`.
    pub index_in_node: usize,
    /// Workers of this node.
    pub node_workers: usize,
    /// Nodes of the plan.
    pub nodes: usize,
    /// Workers over all nodes.
    pub workers: usize,
    shared: &'pool Shared,
    /// Barriers count threads, so a `Worker` must stay on its own.
    not_sync: PhantomData<Cell<()>>,
}

impl<'pool> Worker<'pool> {
    pub(super) fn new(shared: &'pool Shared, index: usize) -> Self {
        let (node, index_in_node) = shared.place(index);
        Self {
            index,
            node,
            index_in_node,
            node_workers: shared.nodes[node].workers,
            nodes: shared.nodes.len(),
            workers: shared.workers.len(),
            shared,
            not_sync: PhantomData,
        }
    }

    /// Waits until all workers of the node have come here; what they wrote before is visible after.
    ///
    /// # Errors
    /// [`Aborted`] when a worker of the job panicked or returned an error; return from the job.
    #[inline]
    pub fn node_barrier(&self) -> Result<(), Aborted> {
        let state = self.state();
        state.enter(Phase::NodeBarrier);
        self.shared.nodes[self.node].barrier.wait(&state.barrier_spin)?;
        state.enter(Phase::Running);
        Ok(())
    }

    /// Waits until all workers of all nodes have come here: nodes count their own, and only one worker per node
    /// touches what the nodes share.
    ///
    /// # Errors
    /// [`Aborted`] when a worker of the job panicked or returned an error; return from the job.
    #[inline]
    pub fn root_barrier(&self) -> Result<(), Aborted> {
        let state = self.state();
        state.enter(Phase::RootBarrier);
        let node = &self.shared.nodes[self.node].barrier;
        match node.arrive()? {
            Arrival::Early(ticket) => node.pass(ticket, &state.barrier_spin)?,
            Arrival::Last => {
                if self.nodes > 1 {
                    self.shared.root.wait(&state.barrier_spin)?;
                }
                node.open();
            }
        }
        state.enter(Phase::Running);
        Ok(())
    }

    /// The next task of this worker's node, its own first; counts as progress.
    #[inline]
    pub fn claim(&self, tasks: &StealRange) -> Option<usize> {
        let task = tasks.claim(self.index_in_node);
        self.state().beat();
        task
    }

    /// Tells the watchdog that this worker is alive; costs a store to the worker's own cache line. Jobs call it at
    /// least once per panel or task; barriers and claims do so themselves.
    #[inline]
    pub fn progress(&self) {
        self.state().beat();
    }

    /// Whether the job has failed elsewhere, for long stretches without a barrier.
    #[inline]
    pub fn is_aborted(&self) -> bool {
        self.shared.failed.load(Ordering::Relaxed)
    }

    #[inline]
    fn state(&self) -> &'pool WorkerState {
        &self.shared.workers[self.index]
    }
}

/// Where a worker is, for the state dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Phase {
    Idle,
    Running,
    NodeBarrier,
    RootBarrier,
    Finished,
    Exited,
}

impl Phase {
    const fn name(code: u32) -> &'static str {
        match code {
            c if c == Self::Idle as u32 => "idle",
            c if c == Self::Running as u32 => "running",
            c if c == Self::NodeBarrier as u32 => "in node barrier",
            c if c == Self::RootBarrier as u32 => "in root barrier",
            c if c == Self::Finished as u32 => "finished",
            _ => "exited",
        }
    }
}

/// One worker's own cache line: written by its thread only, read by the watchdog and by dumps.
#[derive(Debug)]
pub(super) struct WorkerState {
    heartbeat: AtomicU64,
    phase: AtomicU32,
    pub(super) idle_spin: SpinBudget,
    pub(super) barrier_spin: SpinBudget,
}

impl WorkerState {
    pub(super) fn new(idle_spin: SpinBudget, barrier_spin: SpinBudget) -> Self {
        Self {
            heartbeat: AtomicU64::new(0),
            phase: AtomicU32::new(Phase::Idle as u32),
            idle_spin,
            barrier_spin,
        }
    }

    /// One writer, so a plain load and store do instead of a locked addition.
    #[inline]
    fn beat(&self) {
        self.heartbeat.store(self.heartbeat.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u32, Ordering::Relaxed);
        self.beat();
    }

    pub(super) fn heartbeat(&self) -> u64 {
        self.heartbeat.load(Ordering::Relaxed)
    }

    pub(super) fn phase_name(&self) -> &'static str {
        Phase::name(self.phase.load(Ordering::Relaxed))
    }

    pub(super) fn is_in(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::Relaxed) == phase as u32
    }
}
