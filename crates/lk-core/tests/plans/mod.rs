//! Plans and pools for the pool's tests.

#![allow(unreachable_pub, reason = "every test binary has its own copy")]

use std::sync::Arc;

use lk_core::pool::{Pool, PoolOptions};
use lk_core::topology::{CpuId, NodeId, NodePlan, WorkerPlan, WorkerSlot};

/// A plan of `nodes[n]` workers on node `n`, dealt over the CPUs that this process may use.
pub fn plan(nodes: &[usize]) -> WorkerPlan {
    let cpus = allowed_cpus();
    let mut next = cpus.iter().cycle();
    let mut slot = || WorkerSlot { cpus: vec![CpuId(*next.next().unwrap())] };
    let nodes = nodes
        .iter()
        .enumerate()
        .map(|(node, &workers)| NodePlan {
            node: NodeId(node as u32),
            workers: (0..workers).map(|_| slot()).collect(),
        })
        .collect();
    WorkerPlan { nodes, notes: Vec::new() }
}

/// Defaults but for the idle spin.
pub fn options(spin_us: u32) -> PoolOptions {
    PoolOptions { spin_us, ..PoolOptions::default() }
}

/// A pool on [`plan`].
pub fn pool(nodes: &[usize], spin_us: u32) -> Arc<Pool> {
    Pool::new(&plan(nodes), &options(spin_us)).unwrap()
}

/// CPUs in the calling thread's mask.
pub fn allowed_cpus() -> Vec<u32> {
    let mut mask = [0_u64; 128];
    // SAFETY: the kernel writes at most the given number of bytes.
    let bytes = unsafe {
        libc::syscall(libc::SYS_sched_getaffinity, 0, std::mem::size_of_val(&mask), mask.as_mut_ptr())
    };
    assert!(bytes > 0);
    (0..mask.len() as u32 * 64).filter(|cpu| mask[*cpu as usize / 64] >> (cpu % 64) & 1 == 1).collect()
}
