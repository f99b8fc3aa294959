//! Placing memory on NUMA nodes, and finding out where it really is.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::{fs, io};

use super::mapping::PAGE_BYTES;
use crate::topology::{NodeId, Topology};

/// What became of a request to place memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindOutcome {
    /// The kernel took the policy: pages come from the node as long as it has any, then from the nearest.
    Bound,
    /// The kernel refused with this `errno`; pages come from the node of the thread that first touches them.
    FirstTouch {
        /// `ENOSYS`, `EPERM`, `EINVAL`, ...
        errno: i32,
    },
    /// Nothing was asked of the kernel.
    Skipped,
}

/// Pages of a range by the node that they are on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Pages (or sampled pages) present, by node.
    pub by_node: BTreeMap<NodeId, usize>,
    /// Sampled pages that no memory backs yet.
    pub absent: usize,
}

/// Places memory on nodes. A failure is never an error: placement by first touch from pinned threads is the
/// fall-back, and the outcome says which of both it is.
pub trait MemBinder: Send + Sync {
    /// Asks that pages of `ptr..ptr + len` be taken from `node` when first touched. `ptr` is page-aligned. The
    /// node is named by number, so nodes without CPUs (CXL, HBM) can be named too.
    fn bind(&self, ptr: *mut u8, len: usize, node: NodeId) -> BindOutcome;

    /// Asks that pages of the range be spread over `nodes` page by page.
    fn interleave(&self, ptr: *mut u8, len: usize, nodes: &[NodeId]) -> BindOutcome;

    /// Where the pages of the range are, from a sample of at most a few thousand pages; `None` if the system
    /// doesn't tell.
    fn where_is(&self, ptr: *const u8, len: usize) -> Option<PageCounts>;
}

/// The system calls under [`SyscallBinder`], so that a test can make them fail. Errors are `errno` values.
pub trait PolicyCalls: Send + Sync {
    /// `mbind(2)` without flags; `nodes` is the node mask, 64 nodes a word.
    fn mbind(&self, addr: usize, len: usize, mode: i32, nodes: &[u64]) -> Result<(), i32>;
    /// `set_mempolicy(2)`: policy of the calling thread.
    fn set_thread_policy(&self, mode: i32, nodes: &[u64]) -> Result<(), i32>;
    /// `get_mempolicy(2)`: mode of the calling thread's policy, its nodes into `nodes`.
    fn thread_policy(&self, nodes: &mut [u64]) -> Result<i32, i32>;
    /// `move_pages(2)` of this process as a query: the node (or negative `errno`) of each page into `status`.
    fn query_pages(&self, pages: &[usize], status: &mut [i32]) -> Result<(), i32>;
}

/// The kernel's own calls.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinuxCalls;

impl PolicyCalls for LinuxCalls {
    fn mbind(&self, addr: usize, len: usize, mode: i32, nodes: &[u64]) -> Result<(), i32> {
        let max_node = max_node(nodes);
        // SAFETY: `nodes` holds max_node - 1 bits. A policy changes from where future pages of the range
        // come, not any byte of it, whatever the range holds.
        let rc = unsafe { libc::syscall(libc::SYS_mbind, addr, len, mode, nodes.as_ptr(), max_node, 0) };
        if rc == 0 { Ok(()) } else { Err(last_errno()) }
    }

    fn set_thread_policy(&self, mode: i32, nodes: &[u64]) -> Result<(), i32> {
        // "No nodes" is a null mask; an empty slice's pointer isn't null.
        let mask = if nodes.is_empty() { std::ptr::null() } else { nodes.as_ptr() };
        // SAFETY: `mask` is null or holds max_node - 1 bits.
        let rc = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, max_node(nodes)) };
        if rc == 0 { Ok(()) } else { Err(last_errno()) }
    }

    fn thread_policy(&self, nodes: &mut [u64]) -> Result<i32, i32> {
        let mut mode = 0i32;
        let (max_node, no_address) = (max_node(nodes), std::ptr::null::<u8>());
        // SAFETY: the kernel writes one int and at most max_node - 1 bits, rounded up to words of `nodes`.
        let rc = unsafe {
            libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, nodes.as_mut_ptr(), max_node, no_address, 0)
        };
        if rc == 0 { Ok(mode) } else { Err(last_errno()) }
    }

    fn query_pages(&self, pages: &[usize], status: &mut [i32]) -> Result<(), i32> {
        let count = pages.len().min(status.len());
        let no_targets = std::ptr::null::<i32>();
        // SAFETY: `pages` and `status` hold `count` entries; without target nodes nothing is moved.
        let rc = unsafe {
            libc::syscall(libc::SYS_move_pages, 0, count, pages.as_ptr(), no_targets, status.as_mut_ptr(), 0)
        };
        if rc == 0 { Ok(()) } else { Err(last_errno()) }
    }
}

/// The kernel reads one bit less than it is told.
fn max_node(mask: &[u64]) -> usize {
    mask.len() * 64 + 1
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Most pages that one [`MemBinder::where_is`] asks about.
const SAMPLE_PAGES: usize = 4096;

/// [`MemBinder`] on the kernel's memory policies (`mbind`, `move_pages`).
///
/// The policy is "preferred": when a node is full its neighbours help out, since a remote page is better than an
/// OOM kill; `where_is` then shows the spill. Refusals degrade to first touch and are logged once per
/// process.
#[derive(Debug, Default)]
pub struct SyscallBinder<C = LinuxCalls> {
    calls: C,
    /// First `errno` that says that no later call can succeed either (`ENOSYS`, `EPERM`); 0: none so far.
    refused: AtomicI32,
}

/// Whether the one line about refused policies has been logged in this process.
static REFUSAL_LOGGED: AtomicBool = AtomicBool::new(false);

impl SyscallBinder {
    /// A binder on the running kernel.
    pub fn new() -> Self {
        Self::default()
    }
}

impl<C: PolicyCalls> SyscallBinder<C> {
    /// A binder on other calls than the kernel's.
    pub fn with_calls(calls: C) -> Self {
        Self { calls, refused: AtomicI32::new(0) }
    }

    /// Line for the log if policies are refused for good, else `None`.
    pub fn note(&self) -> Option<String> {
        match self.refused.load(Ordering::Relaxed) {
            0 => None,
            errno => Some(refusal(errno)),
        }
    }

    fn set_policy(&self, ptr: *mut u8, len: usize, mode: i32, nodes: &[NodeId]) -> BindOutcome {
        if len == 0 || nodes.is_empty() {
            return BindOutcome::Skipped;
        }
        let errno = self.refused.load(Ordering::Relaxed);
        if errno != 0 {
            return BindOutcome::FirstTouch { errno };
        }
        match self.calls.mbind(ptr.addr(), len, mode, &node_mask(nodes)) {
            Ok(()) => BindOutcome::Bound,
            Err(errno) => {
                if matches!(errno, libc::ENOSYS | libc::EPERM) {
                    self.refused.store(errno, Ordering::Relaxed);
                }
                log_refusal(errno);
                BindOutcome::FirstTouch { errno }
            }
        }
    }
}

/// Bits of `nodes`; sized by the largest number, not by how many there are, since numbers may have holes.
pub(super) fn node_mask(nodes: &[NodeId]) -> Vec<u64> {
    let mut mask = vec![0u64; nodes.iter().map(|n| n.0 as usize / 64 + 1).max().unwrap_or(0)];
    for node in nodes {
        mask[node.0 as usize / 64] |= 1 << (node.0 % 64);
    }
    mask
}

/// Says once per process that policies are refused.
pub(super) fn log_refusal(errno: i32) {
    if !REFUSAL_LOGGED.swap(true, Ordering::Relaxed) {
        tracing::warn!("{}", refusal(errno));
    }
}

fn refusal(errno: i32) -> String {
    format!(
        "Memory policy not permitted ({}), using first touch from pinned threads.",
        io::Error::from_raw_os_error(errno)
    )
}

impl<C: PolicyCalls> MemBinder for SyscallBinder<C> {
    fn bind(&self, ptr: *mut u8, len: usize, node: NodeId) -> BindOutcome {
        self.set_policy(ptr, len, libc::MPOL_PREFERRED, &[node])
    }

    fn interleave(&self, ptr: *mut u8, len: usize, nodes: &[NodeId]) -> BindOutcome {
        self.set_policy(ptr, len, libc::MPOL_INTERLEAVE, nodes)
    }

    fn where_is(&self, ptr: *const u8, len: usize) -> Option<PageCounts> {
        let first = ptr.addr() / PAGE_BYTES;
        let num_pages = (ptr.addr() + len).div_ceil(PAGE_BYTES) - first;
        if len == 0 {
            return Some(PageCounts::default());
        }
        let samples = num_pages.min(SAMPLE_PAGES);
        let pages: Vec<usize> =
            (0..samples).map(|i| (first + i * num_pages / samples) * PAGE_BYTES).collect();
        let mut status = vec![i32::MIN; samples];
        if self.calls.query_pages(&pages, &mut status).is_err() {
            // Containers that forbid the call still show the file.
            let maps = fs::read_to_string("/proc/self/numa_maps").ok()?;
            return numa_maps_counts(&maps, first * PAGE_BYTES, (first + num_pages) * PAGE_BYTES);
        }
        let mut counts = PageCounts::default();
        for node in status {
            match u32::try_from(node) {
                Ok(node) => *counts.by_node.entry(NodeId(node)).or_default() += 1,
                Err(_) => counts.absent += 1,
            }
        }
        Some(counts)
    }
}

/// The binder for this machine: none where there is only one node to choose.
pub fn default_binder(topology: &Topology) -> Box<dyn MemBinder> {
    if topology.nodes.len() > 1 { Box::new(SyscallBinder::new()) } else { Box::new(NullBinder) }
}

/// Pages by node of the mappings that begin in `start..end`, from the text of `/proc/self/numa_maps` (one line per
/// mapping: start address, policy, `N<node>=<pages>`). `None` if no mapping begins there: the range is part of a
/// larger one, whose counts would not be its own.
pub fn numa_maps_counts(maps: &str, start: usize, end: usize) -> Option<PageCounts> {
    let mut found = false;
    let mut counts = PageCounts::default();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let Some(address) = words.next().and_then(|w| usize::from_str_radix(w, 16).ok()) else { continue };
        if !(start..end).contains(&address) {
            continue;
        }
        found = true;
        for (node, pages) in words.filter_map(|w| w.strip_prefix('N')?.split_once('=')) {
            if let (Ok(node), Ok(pages)) = (node.parse(), pages.parse::<usize>()) {
                *counts.by_node.entry(NodeId(node)).or_default() += pages;
            }
        }
    }
    found.then_some(counts)
}

/// Leaves all memory to first touch: for machines with one node, and where policies are unwanted.
#[derive(Debug, Clone, Copy, Default)]
pub struct NullBinder;

impl MemBinder for NullBinder {
    fn bind(&self, _: *mut u8, _: usize, _: NodeId) -> BindOutcome {
        BindOutcome::Skipped
    }

    fn interleave(&self, _: *mut u8, _: usize, _: &[NodeId]) -> BindOutcome {
        BindOutcome::Skipped
    }

    fn where_is(&self, _: *const u8, _: usize) -> Option<PageCounts> {
        None
    }
}

/// One call of a [`RecordingBinder`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindCall {
    /// Start of the range.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
    /// One node for `bind`, all for `interleave`.
    pub nodes: Vec<NodeId>,
}

/// Remembers what it was asked, answers [`BindOutcome::Bound`], and claims that memory is where it was
/// bound: lets tests of many nodes run on a machine with one.
#[derive(Debug, Default)]
pub struct RecordingBinder {
    calls: Mutex<Vec<BindCall>>,
}

impl RecordingBinder {
    /// All calls so far, in order.
    pub fn calls(&self) -> Vec<BindCall> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<BindCall>> {
        self.calls.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl MemBinder for RecordingBinder {
    fn bind(&self, ptr: *mut u8, len: usize, node: NodeId) -> BindOutcome {
        self.interleave(ptr, len, &[node])
    }

    fn interleave(&self, ptr: *mut u8, len: usize, nodes: &[NodeId]) -> BindOutcome {
        self.lock().push(BindCall { addr: ptr.addr(), len, nodes: nodes.to_vec() });
        BindOutcome::Bound
    }

    fn where_is(&self, ptr: *const u8, len: usize) -> Option<PageCounts> {
        let calls = self.lock();
        let call = calls.iter().rev().find(|c| (c.addr..c.addr + c.len).contains(&ptr.addr()))?;
        let mut counts = PageCounts::default();
        for page in 0..len.div_ceil(PAGE_BYTES) {
            *counts.by_node.entry(call.nodes[page % call.nodes.len()]).or_default() += 1;
        }
        Some(counts)
    }
}
