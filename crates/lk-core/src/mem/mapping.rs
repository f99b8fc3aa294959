//! One anonymous private mapping: the owner of the address range that arenas and lazy buffers hand out.

use std::io;
use std::ptr::NonNull;

use crate::error::{Error, Result};
use crate::topology::NodeId;

/// Size of a huge page on x86-64; arenas are aligned to it.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Size of the pages that the kernel hands out singly.
pub(super) const PAGE_BYTES: usize = 4096;

/// An anonymous private mapping of whole pages; all bytes read as zero until written.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    /// Multiple of the page size, never 0.
    bytes: usize,
}

// SAFETY: a Mapping owns its address range exclusively (anonymous, private, unmapped only in Drop) and has no
// thread affinity: mmap, madvise and munmap act on the process. Access to the bytes isn't given by this type but
// by its holders, each of which states its own rule about who may read and write when.
unsafe impl Send for Mapping {}
// SAFETY: as above; every method of &Mapping either returns plain numbers or issues a system call on the range.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes` bytes, the start aligned to `align` (a power of two, multiple of the page size).
    /// Nothing is committed before it is touched. `node` only names the place in errors.
    pub(super) fn new(bytes: usize, align: usize, node: NodeId) -> Result<Self> {
        let out_of_memory = |detail: String| Error::OutOfMemory { node: node.0, bytes, detail };
        let whole =
            bytes.max(1).checked_next_multiple_of(align).filter(|&b| b <= isize::MAX as usize - align);
        let Some(whole) = whole else {
            return Err(out_of_memory("the size exceeds the address space".to_owned()));
        };
        // Kernels align mappings to pages only; the surplus is cut off again below.
        let surplus = align - PAGE_BYTES;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing memory.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                whole + surplus,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(out_of_memory(format!(
                "mmap: {}; check `ulimit -v`, vm.overcommit_memory and vm.max_map_count, or place fewer layers on the CPU",
                io::Error::last_os_error()
            )));
        }
        let base = raw.cast::<u8>();
        let head = base.addr().next_multiple_of(align) - base.addr();
        let tail = surplus - head;
        // SAFETY: head <= surplus, so base + head and base + head + whole lie in the mapping just made; the two cut
        // ranges are page-aligned parts of it that nobody has seen.
        let start = unsafe {
            if head > 0 {
                libc::munmap(raw, head);
            }
            if tail > 0 {
                libc::munmap(base.add(head + whole).cast(), tail);
            }
            base.add(head)
        };
        let start = NonNull::new(start).ok_or_else(|| out_of_memory("mmap returned address 0".to_owned()))?;
        Ok(Self { start, bytes: whole })
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Mapped bytes, at least what was asked for.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// `madvise` over the page range `start..end` (bytes, multiples of the page size, within the mapping).
    ///
    /// Only for advice that can't change what safe code sees except by zeroing pages: the caller of
    /// `MADV_DONTNEED` answers for there being no reader.
    pub(super) fn advise(&self, start: usize, end: usize, advice: libc::c_int) -> io::Result<()> {
        debug_assert!(start <= end && end <= self.bytes && start.is_multiple_of(PAGE_BYTES));
        if start == end {
            return Ok(());
        }
        // SAFETY: the range lies within this mapping, which lives as long as self.
        let rc = unsafe { libc::madvise(self.start.as_ptr().add(start).cast(), end - start, advice) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Changes the access rights of the whole mapping.
    pub(super) fn protect(&self, protection: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping. Whoever takes PROT_WRITE away has no writer left.
        let rc = unsafe { libc::mprotect(self.start.as_ptr().cast(), self.bytes, protection) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Bytes of the pages that are present, by `mincore`; `None` where that isn't answered.
    pub(super) fn resident_bytes(&self) -> Option<usize> {
        // One status byte per page: 64 KiB of stack-free buffer covers 256 MiB a call.
        let mut status = vec![0u8; 65_536.min(self.bytes / PAGE_BYTES)];
        let mut resident = 0;
        let mut offset = 0;
        while offset < self.bytes {
            let len = (self.bytes - offset).min(status.len() * PAGE_BYTES);
            // SAFETY: offset + len <= bytes, and `status` has a byte for each of the len / PAGE_BYTES pages.
            let rc = unsafe {
                libc::mincore(self.start.as_ptr().add(offset).cast(), len, status.as_mut_ptr().cast())
            };
            if rc != 0 {
                return None;
            }
            resident += status[..len / PAGE_BYTES].iter().filter(|&&s| s & 1 == 1).count();
            offset += len;
        }
        Some(resident * PAGE_BYTES)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping; holders hand out no reference that outlives them.
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.bytes);
        }
    }
}
