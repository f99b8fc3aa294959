//! Keeps the caller and a bound worker from sharing a CPU while another stands empty.
//!
//! Worker 0 is the caller, whose own mask is its owner's affair: it may be bound to, or have drifted to, the CPU of
//! another worker, and the CPU of slot 0 is then idle. The scheduler can't mend that, as the other worker is
//! bound. So at the start of a job the worker whose CPU the caller occupies moves to slot 0's, and back when
//! the caller has left.

use super::affinity::{ThreadId, bind_thread, current_cpu};
use crate::topology::{CpuId, WorkerPlan};

/// A thread that is bound to one CPU of its own.
#[derive(Debug)]
struct Tenant {
    thread: ThreadId,
    cpu: CpuId,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Seats {
    tenants: Vec<Tenant>,
    /// CPUs of slot 0.
    vacant: Vec<CpuId>,
    /// Where the caller was last seen.
    caller: Option<CpuId>,
    /// The tenant that sits on slot 0's CPUs.
    displaced: Option<usize>,
}

impl Seats {
    /// `threads[i]` is the thread of worker `i + 1`, or `None` if it is not bound.
    pub(super) fn new(plan: &WorkerPlan, threads: &[Option<ThreadId>]) -> Self {
        let mut slots = plan.nodes.iter().flat_map(|node| &node.workers);
        let vacant = slots.next().map(|slot| slot.cpus.clone()).unwrap_or_default();
        let tenants = slots
            .zip(threads)
            .filter_map(|(slot, &thread)| match (slot.cpus.as_slice(), thread) {
                (&[cpu], Some(thread)) => Some(Tenant { thread, cpu }),
                _ => None,
            })
            .collect();
        Self { tenants, vacant, caller: None, displaced: None }
    }

    /// Looks where the caller is; two system calls at most, none if it has not moved since the last job.
    #[inline]
    pub(super) fn settle(&mut self) {
        let cpu = current_cpu();
        if cpu != self.caller {
            self.caller = cpu;
            self.reseat();
        }
    }

    #[cold]
    fn reseat(&mut self) {
        let Some(cpu) = self.caller else { return };
        let holder = if self.vacant.is_empty() || self.vacant.contains(&cpu) {
            None
        } else {
            self.tenants.iter().position(|tenant| tenant.cpu == cpu)
        };
        if holder == self.displaced {
            return;
        }
        // A refusal leaves the thread where it is: slower, not wrong.
        if let Some(tenant) = self.displaced.take().map(|index| &self.tenants[index]) {
            let _ = bind_thread(tenant.thread, &[tenant.cpu]);
        }
        if let Some(index) = holder
            && bind_thread(self.tenants[index].thread, &self.vacant).is_ok()
        {
            self.displaced = Some(index);
        }
    }
}
