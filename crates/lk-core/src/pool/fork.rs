//! Tells a forked child from the process that started the threads, without a system call per job.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

const ALIVE: u32 = 1;
const PAGE_BYTES: usize = 4096;

/// The process in which it was made.
///
/// Holds one page that the kernel hands zeroed to every child (`MADV_WIPEONFORK`); where that is refused, the
/// process number is asked for instead.
#[derive(Debug)]
pub(super) struct Origin {
    pid: u32,
    page: Option<NonNull<AtomicU32>>,
}

// SAFETY: the page holds one atomic, is owned by this value and unmapped only when it is dropped.
unsafe impl Send for Origin {}
// SAFETY: as above; all shared access is atomic.
unsafe impl Sync for Origin {}

impl Origin {
    pub(super) fn here() -> Self {
        Self { pid: std::process::id(), page: map_page() }
    }

    /// Whether this is still the process of [`Origin::here`].
    #[inline]
    pub(super) fn is_here(&self) -> bool {
        match self.page {
            // SAFETY: mapped until drop, aligned to a page.
            Some(page) => unsafe { page.as_ref() }.load(Ordering::Relaxed) == ALIVE,
            None => std::process::id() == self.pid,
        }
    }

    /// Number of the process of [`Origin::here`].
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        if let Some(page) = self.page {
            // SAFETY: mapped by `map_page` with this size; no reference outlives `self`.
            unsafe { libc::munmap(page.as_ptr().cast(), PAGE_BYTES) };
        }
    }
}

fn map_page() -> Option<NonNull<AtomicU32>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh private anonymous mapping at an address of the kernel's choice.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), PAGE_BYTES, access, kind, -1, 0) };
    if address == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: advice on the mapping made above.
    if unsafe { libc::madvise(address, PAGE_BYTES, libc::MADV_WIPEONFORK) } != 0 {
        // SAFETY: nothing refers to the mapping yet.
        unsafe { libc::munmap(address, PAGE_BYTES) };
        return None;
    }
    let page = NonNull::new(address.cast::<AtomicU32>())?;
    // SAFETY: mapped, zeroed (a valid atomic), page-aligned, not shared yet.
    unsafe { page.as_ref() }.store(ALIVE, Ordering::Relaxed);
    Some(page)
}
