//! Memory of one NUMA node for packed weights.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::bind::{BindOutcome, MemBinder};
use super::mapping::{HUGE_PAGE_BYTES, Mapping};
use crate::error::{Error, Result};
use crate::topology::NodeId;

/// Writable memory bound to one node: 2 MiB-aligned, zero until written, backed only where it was touched.
///
/// Workers of the node pack weights into disjoint ranges (and by doing so place the pages even where the kernel
/// refuses memory policies), then the arena is sealed and only read.
pub struct NodeArena {
    map: Mapping,
    len: usize,
    node: NodeId,
    outcome: BindOutcome,
    /// Claimed ranges: end by start.
    claims: Mutex<BTreeMap<usize, usize>>,
}

impl NodeArena {
    /// Reserves `bytes` bytes, asks `binder` for `node`, and asks for transparent huge pages. Touches nothing.
    /// A refused policy or refused huge pages are no errors; see [`NodeArena::outcome`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the address range can't be had.
    pub fn new(node: NodeId, bytes: usize, binder: &dyn MemBinder) -> Result<Self> {
        let map = Mapping::new(bytes, HUGE_PAGE_BYTES, node)?;
        let outcome = binder.bind(map.as_ptr(), map.bytes(), node);
        // Kernels without transparent huge pages refuse; 4 KiB pages are slower to walk but right.
        let _ = map.advise(0, map.bytes(), libc::MADV_HUGEPAGE);
        // A forked child can't use the engine; without this advice every fork would copy the page tables of the whole
        // model, and pages registered with a GPU could be split from those that the parent sees.
        let _ = map.advise(0, map.bytes(), libc::MADV_DONTFORK);
        // Core dumps of a failed server hold its state, not its weights.
        let _ = map.advise(0, map.bytes(), libc::MADV_DONTDUMP);
        Ok(Self { map, len: bytes, node, outcome, claims: Mutex::default() })
    }

    /// Usable bytes: what was asked for.
    #[allow(clippy::len_without_is_empty, reason = "a size in bytes, not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Start of the memory.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.as_ptr()
    }

    /// The node that the memory was asked for.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Whether the kernel took the memory policy.
    pub fn outcome(&self) -> BindOutcome {
        self.outcome
    }

    /// The bytes `offset..offset + len` for writing, with a check that nobody else has claimed any of them. For
    /// loading, where one lock per packed part is nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] if the range exceeds the arena or overlaps a claim that is still held.
    pub fn claim(&self, offset: usize, len: usize) -> Result<ArenaClaim<'_>> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len);
        let refuse = |why: &str| {
            Error::Argument(format!(
                "bytes {offset}+{len} of the arena of {} bytes on node {} {why}",
                self.len, self.node.0
            ))
        };
        let end = end.ok_or_else(|| refuse("are out of range"))?;
        if len > 0 {
            let mut claims = self.claims();
            // Claims don't overlap, so the last one that starts before the end is the only one that can reach in.
            if claims.range(..end).next_back().is_some_and(|(_, &other_end)| other_end > offset) {
                return Err(refuse("are being written by another worker"));
            }
            claims.insert(offset, end);
        }
        // SAFETY: in range; the table of claims keeps every other claim off it until this one is dropped.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.map.as_ptr().add(offset), len) };
        Ok(ArenaClaim { arena: self, offset, bytes })
    }

    fn claims(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes `offset..offset + len` for writing, unchecked.
    ///
    /// # Safety
    /// As long as the slice lives no other slice or claim of this arena overlaps it: each worker takes only the ranges of
    /// its own panels.
    ///
    /// # Panics
    /// If the range exceeds the arena.
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's obligation, as stated")]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        check_range("arena", offset, len, self.len);
        // SAFETY: in range, readable and writable until Drop, initialised (the kernel zeroes anonymous pages);
        // that nothing aliases it is the caller's obligation.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_ptr().add(offset), len) }
    }

    /// The bytes `offset..offset + len` for reading before the arena is sealed.
    ///
    /// # Safety
    /// As long as the slice lives no [`NodeArena::slice_mut`] or claim overlaps it.
    ///
    /// # Panics
    /// If the range exceeds the arena.
    pub unsafe fn slice(&self, offset: usize, len: usize) -> &[u8] {
        check_range("arena", offset, len, self.len);
        // SAFETY: in range, initialised; that nobody writes it is the caller's obligation.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset), len) }
    }

    /// Gives all pages back to the system and keeps the range, the policy and the size: bytes are zero again. For a
    /// reload of weights.
    pub fn release(&mut self) {
        release_all(&self.map, self.len);
    }

    /// Ends writing. Takes the arena by value, so that no slice of it is left.
    pub fn seal(self) -> SealedArena {
        SealedArena { arena: self, read_only: false }
    }

    /// As [`NodeArena::seal`] and has the memory-management unit refuse stray writes. Not for memory that is going to be
    /// registered with a GPU driver for writing. Where the kernel refuses, it is sealed without.
    pub fn seal_read_only(self) -> SealedArena {
        let read_only = self.map.protect(libc::PROT_READ).is_ok();
        SealedArena { arena: self, read_only }
    }
}

/// A range of an arena that one worker may write; free again when dropped.
#[derive(Debug)]
pub struct ArenaClaim<'a> {
    arena: &'a NodeArena,
    offset: usize,
    bytes: &'a mut [u8],
}

impl Deref for ArenaClaim<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl DerefMut for ArenaClaim<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

impl Drop for ArenaClaim<'_> {
    fn drop(&mut self) {
        if !self.bytes.is_empty() {
            self.arena.claims().remove(&self.offset);
        }
    }
}

impl fmt::Debug for NodeArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeArena")
            .field("node", &self.node)
            .field("len", &self.len)
            .field("outcome", &self.outcome)
            .finish_non_exhaustive()
    }
}

/// An arena that is only read: shared by all workers without further care.
#[derive(Debug)]
pub struct SealedArena {
    arena: NodeArena,
    read_only: bool,
}

impl SealedArena {
    /// Usable bytes.
    #[allow(clippy::len_without_is_empty, reason = "a size in bytes, not a collection")]
    pub fn len(&self) -> usize {
        self.arena.len
    }

    /// Start of the memory; not to be written through.
    pub fn as_ptr(&self) -> *const u8 {
        self.arena.map.as_ptr()
    }

    /// The node that the memory was asked for.
    pub fn node(&self) -> NodeId {
        self.arena.node
    }

    /// Whether the kernel took the memory policy.
    pub fn outcome(&self) -> BindOutcome {
        self.arena.outcome
    }

    /// The bytes `offset..offset + len`.
    ///
    /// # Panics
    /// If the range exceeds the arena.
    pub fn slice(&self, offset: usize, len: usize) -> &[u8] {
        // SAFETY: seal() consumed the arena and with it every borrow that slice_mut gave; nothing writes any more.
        unsafe { self.arena.slice(offset, len) }
    }

    /// Back to a writable arena, contents kept, for a reload of some weights.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the kernel won't make the memory writable again.
    pub fn unseal(self) -> Result<NodeArena> {
        if self.read_only {
            self.arena.map.protect(libc::PROT_READ | libc::PROT_WRITE).map_err(|e| Error::OutOfMemory {
                node: self.arena.node.0,
                bytes: self.arena.len,
                detail: format!(
                    "mprotect: {e}; raise vm.max_map_count or restart instead of reloading weights"
                ),
            })?;
        }
        Ok(self.arena)
    }

    /// [`SealedArena::unseal`] without the contents: all pages go back to the system.
    ///
    /// # Errors
    /// As [`SealedArena::unseal`].
    pub fn release(self) -> Result<NodeArena> {
        let mut arena = self.unseal()?;
        arena.release();
        Ok(arena)
    }
}

/// Zeroes a mapping by giving its pages back; by hand where the kernel won't (locked memory).
fn release_all(map: &Mapping, len: usize) {
    if map.advise(0, map.bytes(), libc::MADV_DONTNEED).is_err() {
        // SAFETY: called with the only reference to the arena; len <= map.bytes().
        unsafe { std::ptr::write_bytes(map.as_ptr(), 0, len) }
    }
}

/// Panics unless `offset..offset + len` lies within `size` bytes of `what`.
pub(super) fn check_range(what: &str, offset: usize, len: usize, size: usize) {
    assert!(
        offset.checked_add(len).is_some_and(|end| end <= size),
        "range {offset}+{len} exceeds the {what} of {size} bytes"
    );
}
