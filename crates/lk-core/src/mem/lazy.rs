//! Address space that costs memory only where it was written, and gives it back piece by piece.

use std::io;

use super::arena::check_range;
use super::mapping::{Mapping, PAGE_BYTES};
use crate::error::Result;
use crate::topology::NodeId;

/// Backing store of full-shape parameters during a load: checkpoint tensors are copied in, an expert that is complete
/// is packed into its node's arena, and its pages are given back. So the peak is the packed model and the
/// experts in flight, not twice the model.
///
/// Pages are 4 KiB (no huge pages), so that an expert that ends in the middle of a 2 MiB page can go alone.
#[derive(Debug)]
pub struct LazyBuffer {
    map: Mapping,
    len: usize,
}

impl LazyBuffer {
    /// Reserves `bytes` bytes of address space; zero when read, no memory until written.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] if the address range can't be had.
    pub fn new(bytes: usize) -> Result<Self> {
        let map = Mapping::new(bytes, PAGE_BYTES, NodeId(0))?;
        // Kernels without transparent huge pages refuse, and need no telling.
        let _ = map.advise(0, map.bytes(), libc::MADV_NOHUGEPAGE);
        Ok(Self { map, len: bytes })
    }

    /// Start, page-aligned. Whoever reads and writes through it keeps the buffer alive, orders the accesses, and holds no
    /// reference into a range while that is released.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.as_ptr()
    }

    /// Usable bytes: what was asked for.
    #[allow(clippy::len_without_is_empty, reason = "a size in bytes, not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Gives the whole pages within `offset..offset + len` back to the system; they read as zero afterwards. Pages of
    /// which the range covers only a part keep their contents, except that the end of the buffer counts as the end of
    /// a page. Returns the bytes given back.
    ///
    /// # Errors
    /// What `madvise` says (locked memory can't be given back); contents are then unchanged.
    ///
    /// # Panics
    /// If the range exceeds the buffer.
    pub fn release(&self, offset: usize, len: usize) -> io::Result<usize> {
        check_range("buffer", offset, len, self.len);
        let end = offset + len;
        let start = offset.next_multiple_of(PAGE_BYTES);
        let end = if end == self.len { self.map.bytes() } else { end - end % PAGE_BYTES };
        if len == 0 || start >= end {
            return Ok(0);
        }
        self.map.advise(start, end, libc::MADV_DONTNEED)?;
        Ok(end - start)
    }

    /// Bytes of memory behind the buffer now, by `mincore`; pages that were only read (the shared zero page)
    /// count too. `None` where the system doesn't tell.
    pub fn resident_bytes(&self) -> Option<usize> {
        self.map.resident_bytes()
    }
}
