//! Spreading pages that have no better home: page cache and staging filled by a loading thread.

use std::marker::PhantomData;

use super::bind::{BindOutcome, LinuxCalls, PolicyCalls, log_refusal, node_mask};
use crate::topology::NodeId;

/// Words of the largest node mask that Linux is built for (1024 nodes).
const MASK_WORDS: usize = 16;

/// As long as it lives, pages that the *creating thread* is first to touch (page cache of the files that it reads
/// included) are taken from the given nodes in turn. Dropping it restores the thread's policy, be that the
/// default or what `numactl` set.
#[derive(Debug)]
pub struct ThreadInterleave<C: PolicyCalls = LinuxCalls> {
    calls: C,
    before: Option<(i32, [u64; MASK_WORDS])>,
    outcome: BindOutcome,
    /// Policies belong to threads, so this must be dropped where it was made.
    not_send: PhantomData<*mut ()>,
}

impl ThreadInterleave {
    /// Spreads over `nodes`; without effect on fewer than two.
    pub fn new(nodes: &[NodeId]) -> Self {
        Self::with_calls(LinuxCalls, nodes)
    }
}

impl<C: PolicyCalls> ThreadInterleave<C> {
    /// As [`ThreadInterleave::new`] on other calls than the kernel's.
    pub fn with_calls(calls: C, nodes: &[NodeId]) -> Self {
        let (mut before, mut outcome) = (None, BindOutcome::Skipped);
        if nodes.len() > 1 {
            let mut mask = [0; MASK_WORDS];
            let set = calls.thread_policy(&mut mask).and_then(|mode| {
                calls.set_thread_policy(libc::MPOL_INTERLEAVE, &node_mask(nodes)).map(|()| mode)
            });
            match set {
                Ok(mode) => (before, outcome) = (Some((mode, mask)), BindOutcome::Bound),
                Err(errno) => {
                    log_refusal(errno);
                    outcome = BindOutcome::FirstTouch { errno };
                }
            }
        }
        Self { calls, before, outcome, not_send: PhantomData }
    }

    /// Whether the kernel took the policy.
    pub fn outcome(&self) -> BindOutcome {
        self.outcome
    }
}

impl<C: PolicyCalls> Drop for ThreadInterleave<C> {
    fn drop(&mut self) {
        let Some((mode, mask)) = self.before else { return };
        // The default and local policies take no nodes.
        let nodes: &[u64] = if mask.iter().all(|&word| word == 0) { &[] } else { &mask };
        if let Err(errno) = self.calls.set_thread_policy(mode, nodes) {
            tracing::warn!(
                "The thread's memory policy could not be restored (errno {errno}); it stays interleaved."
            );
        }
    }
}
