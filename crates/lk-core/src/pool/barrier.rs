//! Barriers of the workers of one node and of all workers, which a failing job leaves at once.

use crossbeam_utils::CachePadded;

use super::gate::{Gate, SpinBudget, Ticket};
use super::sync::{AtomicU32, Ordering};

/// A barrier was left because another worker of the job failed.
///
/// The job should return at once; `?` turns it into an [`Error`](crate::Error). `Pool::run` returns the error of the
/// worker that failed first, never this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aborted;

impl std::fmt::Display for Aborted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("another worker of the job failed")
    }
}

impl std::error::Error for Aborted {}

impl From<Aborted> for crate::Error {
    fn from(aborted: Aborted) -> Self {
        Self::Argument(aborted.to_string())
    }
}

/// Counts `size` arrivals, then opens its gate; usable again at once.
#[derive(Debug)]
pub(super) struct Barrier {
    size: u32,
    arrived: CachePadded<AtomicU32>,
    gate: CachePadded<Gate>,
}

/// The outcome of arriving without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// All others had arrived; the caller must call [`Barrier::open`].
    Last,
    /// Wait with this ticket.
    Early(Ticket),
}

impl Barrier {
    pub(super) fn new(size: u32) -> Self {
        Self { size, arrived: CachePadded::new(AtomicU32::new(0)), gate: CachePadded::new(Gate::new()) }
    }

    /// Counts the caller in.
    #[inline]
    pub(super) fn arrive(&self) -> Result<Arrival, Aborted> {
        // Taken before arriving: the gate can't move until this thread has been counted.
        let ticket = self.gate.ticket();
        if ticket.is_aborted() {
            return Err(Aborted);
        }
        // Acquire for the last one, who speaks for all; Release for everyone else.
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.size {
            Ok(Arrival::Last)
        } else {
            Ok(Arrival::Early(ticket))
        }
    }

    /// Lets everybody through; only for the thread that arrived last.
    #[inline]
    pub(super) fn open(&self) {
        // Ordered before the next arrivals by the gate's release.
        self.arrived.store(0, Ordering::Relaxed);
        self.gate.advance();
    }

    /// Waits for the last arrival.
    #[inline]
    pub(super) fn pass(&self, ticket: Ticket, spin: &SpinBudget) -> Result<(), Aborted> {
        if self.gate.wait(ticket, spin).is_aborted() { Err(Aborted) } else { Ok(()) }
    }

    /// Arrives and waits.
    #[inline]
    pub(super) fn wait(&self, spin: &SpinBudget) -> Result<(), Aborted> {
        match self.arrive()? {
            Arrival::Last => {
                self.open();
                Ok(())
            }
            Arrival::Early(ticket) => self.pass(ticket, spin),
        }
    }

    /// Sends away everyone who waits or will come, until [`Barrier::reset`].
    pub(super) fn abort(&self) {
        self.gate.abort();
    }

    /// Makes an aborted barrier usable again. No thread may be inside.
    pub(super) fn reset(&self) {
        self.arrived.store(0, Ordering::Relaxed);
        self.gate.clear_abort();
    }
}
